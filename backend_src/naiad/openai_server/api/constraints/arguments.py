"""The grammar of a call's arguments, in the form in which a family writes them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from naiad.grammar.json_schema import refs_in
from naiad.openai_server.api.constraints.lark import TEXT, LarkWriter, quoted
from naiad.openai_server.api.parsing.families import CallForm
from naiad.openai_server.api.parsing.xml_values import branches, own_types, types_of

Schema = Mapping[str, Any]

_DEFINITIONS = {"$defs", "definitions"}
_MAX_SHOWN = 80
# What arguments that are not written as JSON can obey.
_OBJECT_KEYS = {
    *_DEFINITIONS,
    *("type", "properties", "required", "additionalProperties", "title", "description", "$schema"),
}
_LISTS = {"enum", "const"}
# What says nothing of a text's form, but which texts there are.
_TEXT_KEYS = {"type", "title", "description", "default", "examples", *_LISTS}
_SCALARS = {"integer", "number", "boolean"}
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
    # The schema of an argument stands alone, with the definitions.
    for ref in refs_in(parameters):
        if not any(ref.startswith(f"#/{each}/") for each in _DEFINITIONS):
            raise UnenforceableError(f"$ref = {ref[:_MAX_SHOWN]!r}, which is none of the definitions")
    definitions = {key: parameters[key] for key in sorted(_DEFINITIONS & set(parameters))}
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
    if "string" not in types_of(schema):
        return f"{begin} {writer.json(schema)} {quoted(_VALUE_END)}"
    if is_strict:
        _check_text(name, schema)
    texts = _texts(schema)
    if texts is None:
        # It ends where the element does, at the first occurrence of its end.
        value = writer.rule("value", TEXT, f"[suffix={json.dumps(_VALUE_END)}]")
        return f"{begin} {value}"
    choices = writer.rule("choice", " | ".join(map(quoted, texts)))
    return f"{begin} {choices} {quoted(_VALUE_END)}"


def _texts(schema: Schema) -> list[str] | None:
    """The texts that an argument may have that is written as it is; None: any."""
    texts: list[str] = []
    for each in branches(schema):
        values = _listed(each)
        if values is None and own_types(each) != {"null"}:
            return None
        values = [None] if values is None else values
        texts += [value if isinstance(value, str) else json.dumps(value) for value in values]
    return texts


def _listed(schema: Schema) -> Sequence[Any] | None:
    """The values that a schema lists; None: it lists none."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if isinstance(values, list) else None


def _check_text(name: str, schema: Schema) -> None:
    """Refuse what is lost when an argument is written as it is and read as a string wherever it may be one.

    Raises:
        UnenforceableError: the schema says such a thing.
    """
    parts = branches(schema)
    strings = [each for each in parts if "string" in own_types(each)]
    lost = {key for each in strings for key in each} - _TEXT_KEYS - _DEFINITIONS
    if parts[0] is not schema:
        # A string may not obey two branches of a `oneOf`.
        unions = {"anyOf", "oneOf"} if len(strings) == 1 else {"anyOf"}
        lost |= set(schema) - (_TEXT_KEYS - _LISTS) - _DEFINITIONS - unions
    listed = [_listed(each) for each in strings]
    if any(not isinstance(value, str | None) for values in listed for value in values or ()):
        lost.add("enum")
    others = {kind for each in parts for kind in own_types(each) or ("any",)} - {"string", "null"}
    if None in listed:
        # They are strings as well.
        others -= _SCALARS
    lost |= {f"the type {kind} beside string" for kind in others}
    if lost:
        raise UnenforceableError(f"{min(lost)} of the argument {name!r}, which is written as it is")
