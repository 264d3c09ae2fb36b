"""`naiad serve --config FILE`: options in TOML, each by its name without the dashes."""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from naiad.errors import ConfigError, StartupError
from naiad.small_file import read_settings

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_CONFIG = "--config"
# What is about the file itself.
_OWN = ("help", "config", "print_config")
_TRUE_OR_FALSE = ("true", "false")


def with_config(words: Sequence[str], parser: argparse.ArgumentParser) -> list[str]:
    """Return the words of the command line, preceded by those that the file named among them stands for.

    An option of the command line replaces the file's.

    Raises:
        StartupError: the file can not be read, or a key or value of it is not allowed.
    """
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    finder.add_argument(_CONFIG, type=Path)
    try:
        path = finder.parse_known_args(words)[0].config
    except argparse.ArgumentError:
        path = None
    if path is None:
        return list(words)
    actions = {_key(action): action for action in _settings(parser)}
    more = []
    for key, value in _read(path).items():
        if key not in actions:
            near = difflib.get_close_matches(key, actions, n=1)
            raise ConfigError(f"{path}: {key}", value, f"{near[0]} instead" if near else "an option's name")
        if not any(word.split("=")[0] == f"--{key}" for word in words):
            more += _words(path, key, value, actions[key])
    return [*more, *words]


def config_text(args: argparse.Namespace, parser: argparse.ArgumentParser) -> str:
    """Return the options and their values as such a file; those without a value are comments."""
    lines = ["# Options of `naiad serve`, which `naiad serve --config FILE` reads."]
    for action in _settings(parser):
        value = getattr(args, action.dest)
        if value is None and action.default is not None:
            value = "off"
        is_unset = value is None or value == [] or (value == action.default and not _can_be_written(value))
        shown = "" if is_unset else _written(action, value)
        lines.append(f"# {_key(action)} =" if is_unset else f"{_key(action)} = {shown}")
    return "\n".join(lines)


def _settings(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [each for each in parser._actions if each.option_strings and each.dest not in _OWN]


def _key(action: argparse.Action) -> str:
    return action.option_strings[-1].removeprefix("--")


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_settings(path).decode("utf-8"))
    except OSError as error:
        raise StartupError(f"--config {path} can not be read: {error.strerror}") from None
    except ValueError as error:
        raise StartupError(f"--config {path} is not TOML: {error}") from None
    except RecursionError:
        raise StartupError(f"--config {path} is not TOML: it is nested too deeply") from None


def _words(path: Path, key: str, value: Any, action: argparse.Action) -> list[str]:
    """Return the words of the command line that a key and its value stand for."""
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise ConfigError(f"{path}: {key}", value, "true or false")
        return [f"--{key}"] if value else []
    if isinstance(action, argparse._AppendAction):
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise ConfigError(f"{path}: {key}", value, "a list of strings")
        return [f"--{key}={each}" for each in value]
    if isinstance(value, bool) and action.choices and tuple(action.choices) == _TRUE_OR_FALSE:
        return [f"--{key}={str(value).lower()}"]
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ConfigError(f"{path}: {key}", value, "a string or a number")
    return [f"--{key}={value}"]


def _can_be_written(value: object) -> bool:
    """Whether the value is one that a user could give: a default that stands for "not given" is not."""
    return not (isinstance(value, int) and value < 0)


def _written(action: argparse.Action, value: Any) -> str:
    if action.choices and tuple(action.choices) == _TRUE_OR_FALSE:
        return str(value)
    return json.dumps(str(value) if isinstance(value, Path) else value, ensure_ascii=False)
