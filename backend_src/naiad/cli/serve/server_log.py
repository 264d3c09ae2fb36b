"""The server's output, held back while it starts so that the cause of a failure is shown first."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence

# Printed by a server without a GPU; harmless.
_HARMLESS = (
    "Failed to initialize NVML",
    "DCGM unable to start",
    "Unable to allocate pinned system memory",
    "CudaDriverHelper has not been initialized",
    "unable to create stream for ensemble: CUDA driver version is insufficient",
    "failed to allocate pinned system memory",
)
# The most specific pattern first. The log writes a line break as the two characters \n.
_CAUSES = (
    re.compile(r"TritonModelException: (.+?)(?:\\n|\"?$)"),
    re.compile(r"error while loading shared libraries: (.+)"),
    re.compile(r"failed to load '[^']*' version \d+: \w+: (.+?)(?:\\n|\"?$)"),
    re.compile(r"^E\d{4} .*?\] \"?(?:ERROR: )?(.+?)(?:\\n|\"?$)"),
    re.compile(r"^(?:\S+: )?error: (.+)", re.IGNORECASE),
)
# The place where a model raised a Python exception.
_PLACE = re.compile(r"\\n\\nAt:\\n.*")
# Printed after any failure of a model.
_CONSEQUENCE = "failed to load all models"
_MAX_HELD_LINES = 1000


class ServerLog:
    """Passes lines on to `write`, at once or after `release`.

    Attributes:
        num_lines: number of lines taken.
    """

    def __init__(self, write: Callable[[str], None], *, hold: bool) -> None:
        """Set up; if `hold`, lines are held back until `release`."""
        self._write = write
        self._lock = threading.Lock()
        self._held: list[str] | None = [] if hold else None
        self.num_lines = 0

    def take(self, line: str) -> None:
        """Take one line of the server's output, without its line break."""
        if any(words in line for words in _HARMLESS):
            return
        with self._lock:
            self.num_lines += 1
            if self._held is None:
                self._write(line)
            elif len(self._held) < _MAX_HELD_LINES:
                self._held.append(line)

    def release(self) -> list[str]:
        """Write the held lines and from now on every line at once; return the held lines."""
        with self._lock:
            lines, self._held = self._held or [], None
            for line in lines:
                self._write(line)
            return lines

    def held(self) -> list[str]:
        """The lines that are held back."""
        with self._lock:
            return list(self._held or [])


def find_cause(lines: Sequence[str]) -> str | None:
    """The line that best explains why the server did not start."""
    for pattern in _CAUSES:
        for line in lines:
            if match := pattern.search(line):
                return match[1].strip()
    return None


def other_lines(lines: Sequence[str], cause: str) -> list[str]:
    """The other lines, except those that repeat the cause or say where it was raised."""
    return [_PLACE.sub('"', line) for line in lines if cause not in line and _CONSEQUENCE not in line]
