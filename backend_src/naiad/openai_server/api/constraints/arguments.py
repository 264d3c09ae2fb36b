"""The grammar of a call's arguments, in the form in which a family writes them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from naiad.openai_server.api.constraints.lark import TEXT, LarkWriter, quoted
from naiad.openai_server.api.parsing.families import CallForm

Schema = Mapping[str, Any]

_DEFINITIONS = ("$defs", "definitions")
# What arguments that are not written as JSON can obey.
_OBJECT_KEYS = {
    *_DEFINITIONS,
    *("type", "properties", "required", "additionalProperties", "title", "description", "$schema"),
}
# What says nothing of a text's form.
_TEXT_KEYS = {"type", "title", "description", "default", "examples", "enum", "const"}
_VALUE_END = "\n</parameter>\n"


class UnenforceableError(Exception):
    """No grammar holds for all that a schema says; the message names what it is."""


@dataclass(frozen=True, slots=True)
class _Property:
    """An argument: its grammar, and whether it has to be there."""

    grammar: str
    is_required: bool


def closed(parameters: Schema) -> Schema:
    """The schema of arguments, which allows no other ones than it declares unless it speaks of others."""
    if any(key in parameters for key in ("$ref", "anyOf", "oneOf", "allOf", "patternProperties")):
        return parameters
    return {"type": "object", "properties": {}, "additionalProperties": False, **parameters}


def arguments_rule(writer: LarkWriter, form: CallForm, parameters: Schema, *, is_strict: bool) -> str:
    """What stands for the arguments of a tool.

    Args:
        writer: takes the rules.
        form: how the family writes calls.
        parameters: the tool's schema.
        is_strict: what can not be enforced is refused.

    Raises:
        UnenforceableError: the schema says what can not be enforced in this form.
    """
    match form:
        case CallForm.PYTHON:
            return _in_order(writer, _properties(writer, parameters, is_strict, _python_argument), ", ")
        case CallForm.XML:
            return _in_order(writer, _properties(writer, parameters, is_strict, _xml_argument), "")
    return writer.json(closed(parameters))


def _properties(
    writer: LarkWriter,
    parameters: Schema,
    is_strict: bool,
    write: Callable[[LarkWriter, str, Schema, bool], str],
) -> list[_Property]:
    unknown = sorted(set(parameters) - _OBJECT_KEYS)
    if is_strict and (unknown or parameters.get("additionalProperties") not in (None, False)):
        raise UnenforceableError(unknown[0] if unknown else "additionalProperties")
    definitions = {key: parameters[key] for key in _DEFINITIONS if key in parameters}
    required = parameters.get("required", ())
    return [
        _Property(
            write(
                writer, name, {**definitions, **(schema if isinstance(schema, Mapping) else {})}, is_strict
            ),
            name in required,
        )
        for name, schema in parameters.get("properties", {}).items()
    ]


def _in_order(writer: LarkWriter, properties: Sequence[_Property], separator: str) -> str:
    """What stands for arguments in their order, of which those that are not required may be left out."""
    # What may follow the last argument read; nothing is read before the first.
    later, first = quoted(""), quoted("")
    for each in reversed(properties):
        own_later = f"{quoted(separator)} {each.grammar} {later}" if separator else f"{each.grammar} {later}"
        own_first = f"{each.grammar} {later}"
        later = writer.rule("rest", own_later if each.is_required else f"{own_later} | {later}")
        first = writer.rule("rest", own_first if each.is_required else f"{own_first} | {first}")
    return first


def _python_argument(writer: LarkWriter, name: str, schema: Schema, _is_strict: bool) -> str:
    if not re.fullmatch(r"\w+", name):
        raise UnenforceableError(f"the argument {name!r}, which is no name of Python's")
    return f"{quoted(name + '=')} {writer.json(schema)}"


def _xml_argument(writer: LarkWriter, name: str, schema: Schema, is_strict: bool) -> str:
    if not name or ">" in name or "\n" in name:
        raise UnenforceableError(f"the argument {name!r}, which no element can be named")
    begin = quoted(f"<parameter={name}>\n")
    if schema.get("type") != "string":
        return f"{begin} {writer.json(schema)} {quoted(_VALUE_END)}"
    unknown = sorted(set(schema) - _TEXT_KEYS - set(_DEFINITIONS))
    if is_strict and unknown:
        raise UnenforceableError(f"{unknown[0]} of the argument {name!r}, which is written as it is")
    texts = [schema["const"]] if "const" in schema else schema.get("enum")
    if texts is None:
        # It ends where the element does, at the first occurrence of its end.
        value = writer.rule("value", TEXT, f"[suffix={json.dumps(_VALUE_END)}]")
        return f"{begin} {value}"
    choices = writer.rule("choice", " | ".join(quoted(str(text)) for text in texts))
    return f"{begin} {choices} {quoted(_VALUE_END)}"
