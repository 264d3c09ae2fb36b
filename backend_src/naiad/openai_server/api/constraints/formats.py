"""Reads the formats that clients ask for: `response_format` and vLLM's `structured_outputs`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from naiad.frontend.field import FieldError, shown
from naiad.frontend.fields import FIELD
from naiad.frontend.grammar import structured_output_of
from naiad.openai_server.api.errors import APIError
from naiad.sequence import GrammarKind, GrammarSpec

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_TYPES = "text, json_object or json_schema"
_SCHEMA_KEYS = ("name", "description", "schema", "strict")
_FIELD = FIELD["structured_outputs"]


def read_format(
    response_format: Any, structured_outputs: Any, name: str = "response_format"
) -> GrammarSpec | None:
    """Read the format of an answer; None: any text.

    Args:
        response_format: the field.
        structured_outputs: the field.
        name: the client's name for `response_format`.

    Raises:
        APIError: a field is not valid, or both ask for a format.
    """
    first = None if response_format is None else read_response_format(response_format, name)
    second = None if structured_outputs is None else _structured_outputs(structured_outputs)
    if first is not None and second is not None:
        raise _error("structured_outputs", f"structured_outputs and {name} both ask for a format")
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
            return GrammarSpec(kind=GrammarKind.JSON_OBJECT, field=param)
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
    return GrammarSpec(kind=GrammarKind.JSON_SCHEMA, source=json.dumps(schema), field=param)


def _structured_outputs(sent: Any) -> GrammarSpec | None:
    try:
        return structured_output_of(_FIELD, _FIELD.name, sent)
    except FieldError as error:
        raise APIError(400, f"{error}.", param=_FIELD.name) from None


def _check_keys(param: str, place: str, sent: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for key, value in sent.items():
        if key not in known and value is not None:
            shown_key = str(key)[:80]
            raise _error(
                param, f"{place}.{shown_key} = {shown(value)} is not supported: expected {', '.join(known)}"
            )


def _error(param: str, problem: str) -> APIError:
    return APIError(400, f"{problem}.", param=param)
