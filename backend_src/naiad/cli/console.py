"""Prints the commands' messages to the user."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import TextIO

from naiad.log_lines import Level, LogFormat, log_line

_log_format: LogFormat | None = None


def use_log_format(log_format: LogFormat | None) -> None:
    """From now on write messages as lines of a log, with time and level; None: as plain text."""
    global _log_format
    _log_format = log_format


def say(message: str, level: Level = "info") -> None:
    """Print a line to stderr, at once; stdout is for results."""
    if _log_format is None:
        line = f"naiad: {'warning: ' if level == 'warning' else ''}{message}"
    else:
        line = log_line(_log_format, "naiad", level, message, now_s=time.time())
    write(f"{line}\n", sys.stderr)


def say_if_possible(message: str, level: Level = "info") -> None:
    """Print a line to stderr as `say` does; a line that can not be written is lost, and nothing else.

    For what is said while a server runs: it goes on when the disk is full or the reader has gone.
    """
    with contextlib.suppress(OSError):
        say(message, level)


def say_error(error: Exception) -> None:
    """Print the error that ends a command."""
    if _log_format == "json":
        say(str(error), "error")
    else:
        write(f"naiad: error: {error}\n", sys.stderr)


def write(text: str, stream: TextIO) -> None:
    """Write lines at once and in one piece.

    Where PYTHONUNBUFFERED is set, `print` writes the end of a line on its own. The server writes to the
    same pipe, and its lines could come between.
    """
    stream.write(text)
    stream.flush()


def write_if_possible(text: str, stream: TextIO) -> None:
    """Write as `write` does, while a server runs; what can not be written is lost, and nothing else."""
    with contextlib.suppress(OSError):
        write(text, stream)
