"""Prints the commands' messages to the user."""

from __future__ import annotations

import sys
import time

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
    print(line, file=sys.stderr, flush=True)


def say_error(error: Exception) -> None:
    """Print the error that ends a command."""
    if _log_format == "json":
        say(str(error), "error")
    else:
        print(f"naiad: error: {error}", file=sys.stderr, flush=True)
