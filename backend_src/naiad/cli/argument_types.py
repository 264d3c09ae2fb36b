"""Types of command-line options; a wrong value gets a message that says what is allowed."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path

_MAX_PORT = 65535
_MAX_COUNT = 2**31 - 1
_MAX_BYTES = 2**63 - 1


def at_least(least: int, most: int = _MAX_COUNT) -> Callable[[str], int]:
    """Return a type for whole numbers in `least` … `most`; `least` is not negative."""

    def read(text: str) -> int:
        value = _whole_number(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number ≥ {least}")
        if value > most:
            raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number, {least} … {most}")
        return value

    return read


def num_bytes(text: str) -> int:
    """A size in bytes.

    Raises:
        argparse.ArgumentTypeError: the text is not one.
    """
    return at_least(0, _MAX_BYTES)(text)


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
    value = _whole_number(text)
    if not 0 <= value <= _MAX_PORT:
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


def _whole_number(text: str) -> int:
    """Return the number; -1 if the text is none, and `_MAX_BYTES` + 1 if it has too many digits."""
    if not (text.isascii() and text.isdigit()):
        return -1
    # Python refuses to read thousands of digits.
    return int(text) if len(text) <= len(str(_MAX_BYTES)) else _MAX_BYTES + 1
