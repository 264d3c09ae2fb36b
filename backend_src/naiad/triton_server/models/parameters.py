"""The `parameters` of a model's config.pbtxt, checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from naiad.errors import ConfigError

_TRITONS_KEYS = frozenset({"FORCE_CPU_ONLY_INPUT_TENSORS", "EXECUTION_ENV_PATH"})


def refuse_unknown_keys(parameters: Mapping[str, str], known: Iterable[str]) -> None:
    """Refuse unknown keys, so that a misspelt one is not ignored.

    Raises:
        ConfigError: a key is unknown; the message names it and the known keys.
    """
    known = tuple(known)
    for key, value in parameters.items():
        if key not in known and key not in _TRITONS_KEYS:
            raise ConfigError(key, value, f"one of the keys {', '.join(known)}")


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
