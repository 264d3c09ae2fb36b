"""Reads the formats that clients ask for: `response_format` and vLLM's `structured_outputs`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from naiad.frontend.field import shown
from naiad.openai_server.api.errors import APIError
from naiad.sequence import GrammarKind, GrammarSpec

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_TYPES = "text, json_object or json_schema"
_SCHEMA_KEYS = ("name", "description", "schema", "strict")
# Options of `structured_outputs`, with the values that ask for nothing besides null.
_OPTIONS: Mapping[str, tuple[Any, ...]] = {
    "disable_any_whitespace": (False,),
    "disable_additional_properties": (False,),
    "disable_fallback": (False,),
    "whitespace_pattern": (),
    "structural_tag": (),
    "_backend": (),
}
_MAX_CHOICES = 1000


def read_format(response_format: Any, structured_outputs: Any) -> GrammarSpec | None:
    """Read the format of an answer; None: any text.

    Raises:
        APIError: a field is not valid, or both ask for a format.
    """
    first = None if response_format is None else read_response_format(response_format)
    second = None if structured_outputs is None else _structured_outputs(structured_outputs)
    if first is not None and second is not None:
        raise _error("structured_outputs", "structured_outputs and response_format both ask for a format")
    return first or second


def read_response_format(sent: Any, param: str = "response_format") -> GrammarSpec | None:
    """Read `response_format`, by this name.

    Raises:
        APIError: it is not valid.
    """
    kind = sent.get("type") if isinstance(sent, Mapping) else None
    match kind:
        case "text":
            _check_keys(param, param, sent, ("type",))
            return None
        case "json_object":
            _check_keys(param, param, sent, ("type",))
            return GrammarSpec(kind=GrammarKind.JSON_OBJECT)
        case "json_schema":
            _check_keys(param, param, sent, ("type", "json_schema"))
            place = f"{param}.json_schema"
            described = sent.get("json_schema")
            if not isinstance(described, Mapping):
                raise _error(param, f"{place} = {shown(described)}: expected an object")
            return read_named_schema(described, place, param)
    raise _error(param, f"{param}.type = {shown(kind)} is not supported: expected {_TYPES}")


def read_named_schema(sent: Mapping[str, Any], place: str, param: str) -> GrammarSpec:
    """Read a schema with its name; all of it is enforced, whether it is strict or not.

    Raises:
        APIError: it is not valid.
    """
    _check_keys(param, place, sent, _SCHEMA_KEYS)
    name, description, schema, strict = (sent.get(key) for key in _SCHEMA_KEYS)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _error(param, f"{place}.name = {shown(name)}: expected 1 … 64 letters, digits, _ or -")
    if not isinstance(description, str | None):
        raise _error(param, f"{place}.description = {shown(description)}: expected a string")
    if not isinstance(schema, Mapping):
        raise _error(param, f"{place}.schema = {shown(schema)}: expected a JSON schema")
    if not isinstance(strict, bool | None):
        raise _error(param, f"{place}.strict = {shown(strict)}: expected true or false")
    return GrammarSpec(kind=GrammarKind.JSON_SCHEMA, source=json.dumps(schema))


def _structured_outputs(sent: Any) -> GrammarSpec | None:
    param = "structured_outputs"
    if not isinstance(sent, Mapping):
        raise _error(param, f"{param} = {shown(sent)}: expected an object")
    asked = {key: value for key, value in sent.items() if value is not None}
    for key, allowed in _OPTIONS.items():
        if key in asked and asked.pop(key) not in allowed:
            expected = " or ".join(["no value", *map(repr, allowed)])
            value = shown(sent[key])
            raise _error(param, f"{param}.{key} = {value} is not supported: expected {expected}")
    _check_keys(param, param, asked, tuple(_KINDS))
    asked = {key: value for key, value in asked.items() if key != "json_object" or value is not False}
    if len(asked) != 1:
        sent_keys = ", ".join(asked) or "none"
        raise _error(param, f"{param} has {sent_keys}: expected exactly one of {', '.join(_KINDS)}")
    ((key, value),) = asked.items()
    spec = _KINDS[key](value)
    if spec is None:
        raise _error(param, f"{param}.{key} = {shown(value)}: expected {_EXPECTED[key]}")
    return spec


def _json(value: Any) -> GrammarSpec | None:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    return _text(GrammarKind.JSON_SCHEMA, json.dumps(value)) if isinstance(value, Mapping) else None


def _json_object(value: Any) -> GrammarSpec | None:
    return GrammarSpec(kind=GrammarKind.JSON_OBJECT) if value is True else None


def _choice(value: Any) -> GrammarSpec | None:
    is_list = isinstance(value, list) and 1 <= len(value) <= _MAX_CHOICES
    if not is_list or not all(isinstance(each, str) and each for each in value):
        return None
    return _text(GrammarKind.CHOICE, json.dumps(value))


def _grammar(value: Any) -> GrammarSpec | None:
    """GBNF, or Lark; only GBNF's rules have `::=`."""
    kind = GrammarKind.EBNF if isinstance(value, str) and "::=" in value else GrammarKind.LARK
    return _text(kind, value)


def _text(kind: GrammarKind, value: Any) -> GrammarSpec | None:
    return GrammarSpec(kind=kind, source=value) if isinstance(value, str) and value else None


_KINDS: Mapping[str, Callable[[Any], GrammarSpec | None]] = {
    "json": _json,
    "json_object": _json_object,
    "regex": lambda value: _text(GrammarKind.REGEX, value),
    "choice": _choice,
    "grammar": _grammar,
}
_EXPECTED = {
    "json": "a JSON schema",
    "json_object": "true",
    "regex": "a regular expression",
    "choice": f"a list of 1 … {_MAX_CHOICES} texts that are not empty",
    "grammar": "a grammar in GBNF or Lark",
}


def _check_keys(param: str, place: str, sent: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for key, value in sent.items():
        if key not in known and value is not None:
            shown_key = str(key)[:80]
            raise _error(
                param, f"{place}.{shown_key} = {shown(value)} is not supported: expected {', '.join(known)}"
            )


def _error(param: str, problem: str) -> APIError:
    return APIError(400, f"{problem}.", param=param)
