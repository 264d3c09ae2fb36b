"""Decides that a server has failed to start although it still runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# The server itself may report within this time why a stub has ended, and end.
DEAD_STUB_S = 10.0
# Idle processes of ours use less than this share of a core.
_WORKING_SHARE = 0.05
_WINDOW_S = 10.0
_READING_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class StartSight:
    """What can be seen of a starting server from outside.

    Attributes:
        stubs: process id → model, of its live stubs.
        dead_stubs: process id → how it ended, of stubs that have ended and that the server has not asked for.
        num_lines: number of lines that it has printed.
        cpu_s: processor time that its stubs and engines have used.
        read_bytes: what they have read from disks.
    """

    stubs: Mapping[int, str] = field(default_factory=dict)
    dead_stubs: Mapping[int, str] = field(default_factory=dict)
    num_lines: int = 0
    cpu_s: float = 0.0
    read_bytes: int = 0


class StartWatch:
    """Takes a sight every second or so; tells when a stub is dead and when nothing happens any more."""

    def __init__(self, timeout_s: float, now_s: float) -> None:
        """Begin; a start may be without progress for `timeout_s`."""
        self._timeout_s = timeout_s
        self._progress_s = self._window_s = now_s
        self._last = self._window = StartSight()
        self._seen_stubs: dict[int, str] = {}
        self._endings: dict[int, str] = {}
        self._gone_since_s: dict[int, float] = {}

    def take(self, sight: StartSight, now_s: float) -> str | None:
        """Take what is seen now; return why the start has failed, or None."""
        dead = self._dead_stub(sight, now_s)
        if dead is not None:
            return f"{self._said_of(dead)}, and the server still waits for it"
        if self._moves(sight, now_s):
            self._progress_s = now_s
        self._last = sight
        if now_s - self._progress_s > self._timeout_s:
            return (
                f"it made no progress for {self._timeout_s:g} s: no output, no new process, no computing, no "
                "reading; --start-timeout-s sets this time"
            )
        return None

    def _dead_stub(self, sight: StartSight, now_s: float) -> int | None:
        """The process id of a stub that has been dead for too long."""
        self._seen_stubs |= sight.stubs
        self._endings |= sight.dead_stubs
        gone = sight.dead_stubs.keys() | (self._seen_stubs.keys() - sight.stubs.keys())
        self._gone_since_s = {pid: self._gone_since_s.get(pid, now_s) for pid in gone}
        late = (pid for pid, since_s in self._gone_since_s.items() if now_s - since_s >= DEAD_STUB_S)
        return next(late, None)

    def _said_of(self, pid: int) -> str:
        model = self._seen_stubs.get(pid)
        whose = f"model {model}" if model else "a model"
        return f"the process of {whose} (the Python backend's stub) ended{self._endings.get(pid, '')}"

    def _moves(self, sight: StartSight, now_s: float) -> bool:
        if (sight.num_lines, sight.stubs.keys()) != (self._last.num_lines, self._last.stubs.keys()):
            return True
        if now_s - self._window_s < _WINDOW_S:
            return False
        worked_s = sight.cpu_s - self._window.cpu_s
        works = worked_s >= _WORKING_SHARE * (now_s - self._window_s)
        reads = sight.read_bytes - self._window.read_bytes >= _READING_BYTES
        self._window, self._window_s = sight, now_s
        return works or reads
