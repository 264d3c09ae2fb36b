"""The `parameters` of a model's config.pbtxt, checked."""

from __future__ import annotations

from collections.abc import Mapping

from naiad.errors import ConfigError


def read_bool(parameters: Mapping[str, str], key: str, *, default: bool) -> bool:
    """Read a true-or-false parameter; absent or empty = the default.

    Raises:
        ConfigError: the value is neither true nor false.
    """
    value = parameters.get(key, "").lower()
    if value not in ("", "true", "false"):
        raise ConfigError(key, value, "true or false")
    return default if not value else value == "true"


def read_count(parameters: Mapping[str, str], key: str) -> int:
    """Read a whole number; 0 if the parameter is absent or empty.

    Raises:
        ConfigError: the value is not a whole number ≥ 0.
    """
    value = parameters.get(key, "") or "0"
    if not (value.isascii() and value.isdigit()):
        raise ConfigError(key, value, "a whole number ≥ 0")
    return int(value)
