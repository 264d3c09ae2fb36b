"""The `parameters` of a model's config.pbtxt, checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from naiad.errors import ConfigError

_TRITONS_KEYS = frozenset({"FORCE_CPU_ONLY_INPUT_TENSORS", "EXECUTION_ENV_PATH"})


def refuse_unknown_keys(parameters: Mapping[str, str], known: Iterable[str]) -> None:
    """A misspelt key must not be ignored.

    Raises:
        ConfigError: names the key and those that are known.
    """
    known = tuple(known)
    for key, value in parameters.items():
        if key not in known and key not in _TRITONS_KEYS:
            raise ConfigError(key, value, f"one of the keys {', '.join(known)}")


def read_bool(parameters: Mapping[str, str], key: str, *, default: bool) -> bool:
    """A true-or-false parameter; absent or empty = the default.

    Raises:
        ConfigError: another word.
    """
    value = parameters.get(key, "").lower()
    if value not in ("", "true", "false"):
        raise ConfigError(key, value, "true or false")
    return default if not value else value == "true"


def read_count(parameters: Mapping[str, str], key: str) -> int:
    """A whole number; absent, empty or 0 = as many as there are.

    Raises:
        ConfigError: no whole number of 0 or more.
    """
    value = parameters.get(key, "") or "0"
    if not (value.isascii() and value.isdigit()):
        raise ConfigError(key, value, "a whole number ≥ 0")
    return int(value)
