"""Prints the commands' messages to the user."""

from __future__ import annotations

import sys


def say(message: str) -> None:
    """Print a line to stderr, at once; stdout is for results."""
    print(f"naiad: {message}", file=sys.stderr, flush=True)
