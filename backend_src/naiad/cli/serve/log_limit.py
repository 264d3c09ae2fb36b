"""Keeps clients from filling the log: of lines of one kind only the first few of each period are written."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable

PERIOD_S = 10.0
BURST = 5
# Of all kinds together, as clients may cause lines of many kinds.
_MAX_LINES = 100

# A line of tritonserver's log names the place in the code that wrote it.
_PLACE = re.compile(r"[IWEFV]\d{4} [\d:.]+ \d+ ([\w./+-]+:\d+)\]")
# What may differ between lines of one kind: quoted words, ids and numbers.
_VARIABLE = re.compile(r"'[^']*'|\"[^\"]*\"|\[[^\]]*\]|\S*\d\S*")
_KIND_CHARS = 60


class LogLimit:
    """Passes lines on to `write`; at the end of a period it says how many it has left out."""

    def __init__(
        self,
        write: Callable[[str], None],
        say: Callable[[str], None],
        later: Callable[[float, Callable[[], None]], None] | None = None,
    ) -> None:
        """Set up.

        Args:
            write: takes the lines that are passed on.
            say: takes the counts.
            later: calls a function after some seconds; None: in a thread.
        """
        self._write = write
        self._say = say
        self._later = later or _in_a_thread
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}
        self._examples: dict[str, str] = {}
        self._num_lines = 0

    def take(self, line: str) -> None:
        """Write the line, or count it."""
        with self._lock:
            if not self._counts:
                self._later(PERIOD_S, self.end_period)
            kind = _kind(line)
            if kind not in self._counts and len(self._counts) >= _MAX_LINES:
                kind = "other kinds"
            count = self._counts[kind] = self._counts.get(kind, 0) + 1
            is_written = count <= BURST and self._num_lines < _MAX_LINES
            self._num_lines += is_written
            self._examples.setdefault(kind, line)
        if is_written:
            self._write(line)

    def end_period(self) -> None:
        """Say how many lines were left out, and begin a new period with the next line."""
        with self._lock:
            num_left_out = sum(self._counts.values()) - self._num_lines
            kinds = sum(1 for count in self._counts.values() if count > BURST)
            most = max(self._counts, key=lambda kind: self._counts[kind], default="")
            example = self._examples.get(most, "")
            self._counts, self._examples, self._num_lines = {}, {}, 0
        if num_left_out:
            more = f" and of {kinds - 1} other kinds" if kinds > 1 else ""
            self._say(f"left out {num_left_out} lines of the last {PERIOD_S:g} s such as{more}: {example}")


def _kind(line: str) -> str:
    if match := _PLACE.match(line):
        return match[1]
    return _VARIABLE.sub("#", line)[:_KIND_CHARS]


def _in_a_thread(delay_s: float, call: Callable[[], None]) -> None:
    timer = threading.Timer(delay_s, call)
    timer.daemon = True
    timer.start()
