"""Reads keys of a checkpoint's JSON files; every error names the key, its value and what is supported."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from naiad.errors import ModelError

Json = Mapping[str, Any]
# A whole number may be larger.
_LARGEST_FLOAT = sys.float_info.max


def parse_json(text: str | bytes) -> Any:
    """Parse a text that a checkpoint holds.

    Raises:
        ValueError: it is not JSON, or JSON that is nested more deeply than can be read.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file.

    Raises:
        ModelError: the file is missing or does not hold a JSON object.
    """
    try:
        value = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist: expected a model directory with {path.name}") from None
    except OSError as error:
        raise ModelError(f"{path} can not be read: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object")
    return value


def bad_value(key: str, value: object, expected: str) -> ModelError:
    """Make the error for a key of config.json whose value is not supported."""
    return ModelError(f"config.json: {key} = {value!r} is not supported: expected {expected}")


def is_int(value: object) -> bool:
    """Whether a value is a whole number; JSON's true is an int to Python."""
    return isinstance(value, int) and not isinstance(value, bool)


def positive_int(config: Json, key: str, default: int | None = None) -> int:
    """Read a whole number ≥ 1; `default` if the key is missing or null."""
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or not is_int(value) or value < 1:
        raise bad_value(key, value, "a positive whole number")
    return value


def positive_float(config: Json, key: str, default: float | None = None) -> float:
    """Read a finite number > 0; `default` if the key is missing or null."""
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value <= _LARGEST_FLOAT:
        raise bad_value(key, value, "a positive number")
    return float(value)


def flag(config: Json, key: str) -> bool:
    """Read true or false; false if the key is missing or null."""
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise bad_value(key, value, "true or false")
    return bool(value)
