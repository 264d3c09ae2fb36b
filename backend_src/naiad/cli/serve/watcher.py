"""Decides when a running server no longer serves."""

from __future__ import annotations

import threading
from collections.abc import Callable

from naiad.cli.console import say_if_possible
from naiad.cli.serve.probes import ProbeFailure

PERIOD_S = 2.0
_RETRY_S = 0.5
_ERRORS_UNTIL_DEAD = 2
# A model may be slow for a long time although every process is alive, for example a tokenizer with a queue
# of long texts, so about 40 s of unanswered probes is needed. Probes are counted instead of seconds
# because the machine may have been suspended.
_SILENCES_UNTIL_DEAD = 17


class Verdict:
    """Counts failed probes; `reason` is set when the server must be restarted."""

    def __init__(self, num_stubs: int) -> None:
        """Take the number of live stubs of the healthy server."""
        self._num_stubs = num_stubs
        self._num_errors = 0
        self._num_silences = 0
        self.reason: str | None = None

    def take(self, failure: ProbeFailure | None, num_stubs: int | None) -> None:
        """Take the outcome of a probe and the number of stubs that live now; None: it is not known."""
        if failure is None:
            self._num_errors = self._num_silences = 0
        elif not failure.is_silence:
            self._num_errors += 1
            if self._num_errors >= _ERRORS_UNTIL_DEAD:
                self.reason = failure.reason
        elif num_stubs is not None and num_stubs < self._num_stubs:
            self.reason = f"{failure.reason}; its process is gone"
        else:
            self._num_silences += 1
            if self._num_silences >= _SILENCES_UNTIL_DEAD:
                self.reason = f"{failure.reason}, {self._num_silences} times in a row"


class Watcher:
    """Probes in a thread of its own, because a probe may take long and signals must not wait for it."""

    def __init__(self, probe: Callable[[], ProbeFailure | None], count_stubs: Callable[[], int]) -> None:
        """Start the thread; the server must be healthy now."""
        self._probe = probe
        self._count_stubs = count_stubs
        self._is_blind = False
        try:
            num_stubs = count_stubs()
        except OSError:
            # Then no stub is ever missing, and a dead model is noticed by its silence.
            num_stubs = 0
        self._verdict = Verdict(num_stubs)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watcher", daemon=True)
        self._thread.start()

    @property
    def reason(self) -> str | None:
        """Why the server must be restarted; None while it serves."""
        return self._verdict.reason

    def stop(self) -> None:
        """Ask the thread to end after the current probe, whose outcome is ignored."""
        self._stopping.set()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread to end."""
        self._thread.join(timeout_s)

    def _watch(self) -> None:
        pause_s = PERIOD_S
        while not self._stopping.wait(pause_s) and self._verdict.reason is None:
            failure, num_stubs = self._look()
            if self._stopping.is_set():
                return
            self._verdict.take(failure, num_stubs)
            pause_s = PERIOD_S if failure is None else _RETRY_S

    def _look(self) -> tuple[ProbeFailure | None, int | None]:
        """Probe and count the stubs; what this process lacks descriptors or memory for is None."""
        failure, num_stubs = None, None
        try:
            failure = self._probe()
            num_stubs = self._count_stubs()
            self._is_blind = False
        except OSError as error:
            if not self._is_blind:
                say_if_possible(f"the server can not be watched now: {error.strerror}", "warning")
            self._is_blind = True
        return failure, num_stubs
