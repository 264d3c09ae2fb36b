"""Notices that Triton does not use a process of a model any more, although it keeps the process.

Release 24.10 forgets a request for ever if its gRPC client cancels it after the model's last response and
before that response has been written. A model that such a request was sent to is never finalized: after a
reload or an unload its old process would keep the engine, the memory and the metrics until the server stops.
A model can not safely ask this release whether it is loaded. What it can see is that another process has been
asked later, or that `naiad serve`, which asks the server, has given the place to nobody.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

from naiad.engine_process import Place
from naiad.triton_server.service.llm_service import LLMService

# A process that is not needed any more is ended by the server within a few seconds, unless requests run.
RETIRE_AFTER_S = 30.0
_LOOK_EVERY_S = 2.0


class Retirement:
    """Ends what a process has when another has had the model's place for `RETIRE_AFTER_S`.

    Of several instances that the server uses side by side one could rest for so long, so that such a model
    has no place.
    """

    def __init__(
        self, place: Place | None, leave: Callable[[], None], log_warning: Callable[[str], None]
    ) -> None:
        """Set up; each request takes the place.

        Args:
            place: the place of the model; None: this process does not retire.
            leave: ends the engine, or the connection to it, and what else belongs to a process in use. A
                thread of its own calls it, unless `leave` has been called before.
            log_warning: writes a line to the log.
        """
        self._place = place
        self._leave = leave
        self._log_warning = log_warning
        self._leaving = threading.Lock()
        self._has_retired = self._has_left = False
        self._taken_at_s = self._began_s = time.monotonic()
        self._next_look_s = 0.0
        self._unused_since_s: float | None = None

    def leave(self) -> None:
        """Leave, unless this has been done; return when it has."""
        with self._leaving:
            if self._has_left:
                return
            self._has_left = True
            if self._place is not None:
                with contextlib.suppress(OSError):
                    self._place.give_up()
            self._leave()

    def look(self, service: LLMService) -> None:
        """See whether it is time; called in each round of housekeeping."""
        now_s = time.monotonic()
        if self._has_retired or now_s < self._next_look_s:
            return
        self._next_look_s = now_s + _LOOK_EVERY_S
        if not self._is_unused(service):
            self._unused_since_s = None
        elif self._unused_since_s is None:
            self._unused_since_s = now_s
        elif now_s - self._unused_since_s >= RETIRE_AFTER_S:
            self._has_retired = True
            threading.Thread(target=self._retire, name="naiad-retirement", daemon=True).start()

    def _is_unused(self, service: LLMService) -> bool:
        if self._place is None or service.open_streams():
            return False
        try:
            if service.last_asked_s > self._taken_at_s:
                self._taken_at_s = service.last_asked_s
                self._place.take(service.last_asked_s)
            # What others have done before it was loaded does not concern it.
            return self._place.is_lost(max(service.last_asked_s, self._began_s))
        except OSError:
            # It can not be seen now.
            return False

    def _retire(self) -> None:
        self._log_warning(
            "naiad: the server keeps a process of a model that it has replaced or unloaded: "
            "the process gives up its engine and its metrics"
        )
        self.leave()
