"""Lets the main loop wait for SIGINT, SIGTERM or SIGHUP."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable
from types import TracebackType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_CLEAN_UP_S = 3.0


class Stopped(KeyboardInterrupt):
    """A signal has come before there is anything that must be stopped in order."""


class StopSignal:
    """Set by the first signal; later ones change nothing. A context manager for the main thread.

    If SIGHUP is ignored at the start, as `nohup` has it, it never stops.

    Attributes:
        on_reload: called on SIGHUP, which then does not stop, unless the terminal was closed; None: it stops.
        ends_at_once: whether the signal raises `Stopped` in the main thread, whatever that does. The process
            ends with exit code 0 if this does not end it within some seconds, as when threads still download.
    """

    def __init__(self) -> None:
        """Open the pipe."""
        # A pipe, not a threading.Event: a handler may run inside the Event's own lock.
        self._read_fd, self._write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._is_set = False
        self._had_terminal = _has_terminal()
        self.on_reload: Callable[[], None] | None = None
        self.ends_at_once = False

    def __enter__(self) -> StopSignal:
        """Install the handlers."""
        self._survives_hang_up = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        self._previous = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Restore the earlier handlers."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        os.close(self._read_fd)
        os.close(self._write_fd)

    @property
    def is_set(self) -> bool:
        """Whether a signal has arrived."""
        return self._is_set

    def wait(self, timeout_s: float) -> bool:
        """Wait for a signal; return whether one has arrived."""
        if not self._is_set:
            select.select([self._read_fd], [], [], timeout_s)
        return self._is_set

    def _handle(self, number: int, _frame: object) -> None:
        if number == signal.SIGHUP and not self._hang_up_stops():
            if self.on_reload is not None:
                self.on_reload()
        elif not self._is_set:
            self._is_set = True
            os.write(self._write_fd, b"s")
            if self.ends_at_once:
                # A handler must not start threads: it may run inside a lock of theirs.
                signal.signal(signal.SIGALRM, lambda *_: os._exit(0))
                signal.setitimer(signal.ITIMER_REAL, _CLEAN_UP_S)
                raise Stopped

    def _hang_up_stops(self) -> bool:
        if self._survives_hang_up:
            return False
        was_closed = self._had_terminal and not _has_terminal()
        return self.on_reload is None or was_closed


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True
