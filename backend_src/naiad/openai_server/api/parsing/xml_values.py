"""Reads the values of arguments that are elements: which type a text has is told by the argument's schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from naiad.openai_server.api.parsing.python_text import Value

_UNIONS = ("anyOf", "oneOf")
_PYTHON_WORDS = {"True": True, "False": False, "None": None}
# What stands beside strings in a schema and is told from them by its form.
_TOLD_FROM_STRINGS: Mapping[str, type] = {"null": type(None), "object": dict, "array": list}


def branches(schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The schemas of which a value has to obey one: those of a union, or the schema itself."""
    unions = [schema[key] for key in _UNIONS if isinstance(schema.get(key), list)]
    if "type" in schema or len(unions) != 1:
        return [schema]
    return [each if isinstance(each, Mapping) else {} for each in unions[0]]


def own_types(schema: Mapping[str, Any]) -> frozenset[str]:
    """The types that `type` names."""
    kind = schema.get("type")
    kinds = kind if isinstance(kind, list) else [kind]
    return frozenset(each for each in kinds if isinstance(each, str))


def types_of(schema: Mapping[str, Any]) -> frozenset[str]:
    """The types that a schema or its branches name."""
    return frozenset(kind for each in branches(schema) for kind in own_types(each))


def value_of(written: str, schema: Any) -> Value:
    """The value that an element's text stands for.

    If the schema allows a string, it is one, unless it is null, an object or a list and the schema allows
    that as well.

    Args:
        written: the text.
        schema: that of the argument; None: the tool does not declare it.
    """
    if schema is None:
        return written
    types = types_of(schema) if isinstance(schema, Mapping) else frozenset()
    if "string" not in types:
        word = _PYTHON_WORDS.get(written.strip(), ...)
        return _json(written) if word is ... else word
    told = tuple(kind for name, kind in _TOLD_FROM_STRINGS.items() if name in types)
    value = _json(written) if told else written
    return value if isinstance(value, told) else written


def _json(written: str) -> Value:
    """What a text stands for in JSON; the text itself if it is none."""
    try:
        value: Value = json.loads(written, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return written
    return value


def _no_constant(name: str) -> Any:
    """JSON has no NaN and no infinity, which Python reads."""
    raise ValueError(name)
