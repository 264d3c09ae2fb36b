"""Types of command-line options; a wrong value gets a message that says what is allowed."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path

_MAX_PORT = 65535


def at_least(least: int) -> Callable[[str], int]:
    """Return a type for whole numbers of at least `least`, which is not negative."""

    def read(text: str) -> int:
        value = int(text) if text.isascii() and text.isdigit() else -1
        if value < least:
            raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number ≥ {least}")
        return value

    return read


def above_0(text: str) -> float:
    """A finite number above 0.

    Raises:
        argparse.ArgumentTypeError: the text is not one.
    """
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number > 0")
    return value


def port_or_off(text: str) -> int | None:
    """A TCP port, 0 for a free one, or None for "off".

    Raises:
        argparse.ArgumentTypeError: the text is neither.
    """
    return None if text == "off" else port_number(text)


def port_number(text: str) -> int:
    """A TCP port; 0 stands for a free one.

    Raises:
        argparse.ArgumentTypeError: the text is not a port.
    """
    value = at_least(0)(text)
    if value > _MAX_PORT:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a port, 0 … {_MAX_PORT}")
    return value


def some_text(text: str) -> str:
    """A text that is not empty.

    Raises:
        argparse.ArgumentTypeError: it is empty.
    """
    if not text.strip():
        raise argparse.ArgumentTypeError(f"{text!r}: expected a name")
    return text


def absolute_path(text: str) -> Path:
    """A path, made absolute: other processes have other working directories.

    Raises:
        argparse.ArgumentTypeError: it is empty.
    """
    return Path(some_text(text)).absolute()
