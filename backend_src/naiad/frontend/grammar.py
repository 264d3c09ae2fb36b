"""Reads what the output has to look like, in the forms of TensorRT-LLM and of vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from naiad.frontend.field import Field, FieldError, shown
from naiad.frontend.fields import FIELD
from naiad.frontend.structural_tag import structural_tag_of
from naiad.sequence import GrammarKind, GrammarSpec

_GUIDE_TYPE, _GUIDE = FIELD["guided_decoding_guide_type"], FIELD["guided_decoding_guide"]
_GUIDE_KINDS = {
    "json": GrammarKind.JSON_OBJECT,
    "json_schema": GrammarKind.JSON_SCHEMA,
    "regex": GrammarKind.REGEX,
    "ebnf_grammar": GrammarKind.EBNF,
}
_CONSTRAINTS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
# The values of vLLM's options that ask for what is done anyway.
_OPTIONS: Mapping[str, tuple[Any, ...]] = {
    "backend": ("", "auto", "guidance"),
    "backend_was_auto": (True, False),
    "disable_fallback": (True, False),
    "disable_any_whitespace": (True, False),
    "disable_additional_properties": (False,),
    "whitespace_pattern": ("",),
}


def guide_of(values: Mapping[str, Any]) -> GrammarSpec | None:
    """Read the guide in a row of TensorRT-LLM's fields, which are checked; None if there is none.

    Raises:
        FieldError: the type is unknown, or does not go with the guide.
    """
    guide_type, guide = values.get(_GUIDE_TYPE.name, ""), values.get(_GUIDE.name, "")
    if not guide_type:
        if guide:
            raise _GUIDE.error(f" was sent without {_GUIDE_TYPE.name}: expected {' or '.join(_GUIDE_KINDS)}")
        return None
    kind = _GUIDE_KINDS.get(guide_type)
    if kind is None:
        raise _GUIDE_TYPE.error(f" = {shown(guide_type)}: expected {' or '.join(_GUIDE_KINDS)}")
    takes_guide = kind is not GrammarKind.JSON_OBJECT
    if bool(guide) != takes_guide:
        expected = "a text" if takes_guide else "none"
        raise _GUIDE.error(f": expected {expected} with {_GUIDE_TYPE.name} = {guide_type}")
    return GrammarSpec(kind=kind, source=guide, field=_GUIDE.name)


def structured_output_of(field: Field, name: str, value: Any) -> GrammarSpec | None:
    """Read vLLM's `structured_outputs` or `guided_decoding`; None if it asks for nothing.

    Args:
        field: its row in the table of fields.
        name: the client's name for it.
        value: an object; or its JSON text.

    Raises:
        FieldError: it is malformed, or asks for something that is not supported.
    """
    sent = _object(name, value)
    for option, allowed in _OPTIONS.items():
        _check_option(f"{name}.{option}", sent.get(option), allowed)
    unknown = next((key for key in sent if key not in _CONSTRAINTS and key not in _OPTIONS), None)
    if unknown is not None:
        known = ", ".join((*_CONSTRAINTS, *_OPTIONS))
        raise FieldError(name, f": unknown key {unknown[:80]!r}: allowed are {known}")
    asked = [key for key in _CONSTRAINTS if not _is_off(key, sent.get(key))]
    if len(asked) > 1:
        raise FieldError(name, f" has {' and '.join(asked)}: expected one of them")
    if not asked:
        return None
    spec = _constraint(name, asked[0], sent[asked[0]])
    if len(spec.source.encode("utf-8", "surrogatepass")) > field.max_item_size:
        raise FieldError(spec.field, f" is too long: at most {field.max_item_size} bytes are allowed")
    return spec


def _object(name: str, value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value) if value.strip() else {}
        except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
            raise FieldError(name, f" = {shown(value)}: expected an object") from None
    if not isinstance(value, dict):
        raise FieldError(name, f" = {shown(value)}: expected an object")
    return value


def _check_option(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if value is None or any(type(value) is type(each) and value == each for each in allowed):
        return
    expected = " or ".join(msgspec.json.encode(each).decode() for each in allowed)
    raise FieldError(name, f" = {shown(value)} is not supported: expected {expected}, or null")


def _is_off(key: str, value: Any) -> bool:
    return value is None or value is False or (key == "structural_tag" and value == "")


def _constraint(name: str, key: str, value: Any) -> GrammarSpec:
    field = f"{name}.{key}"
    if key == "json":
        if not isinstance(value, str | dict):
            raise FieldError(field, f" = {shown(value)}: expected a JSON schema")
        schema = value if isinstance(value, str) else _written(field, value)
        return GrammarSpec(kind=GrammarKind.JSON_SCHEMA, source=schema, field=field)
    if key == "json_object":
        if value is not True:
            raise FieldError(field, f" = {shown(value)}: expected true or false")
        return GrammarSpec(kind=GrammarKind.JSON_OBJECT, field=field)
    if key == "choice":
        if not isinstance(value, list) or not value or not all(isinstance(each, str) for each in value):
            raise FieldError(field, f" = {shown(value)}: expected a list of strings, at least one")
        return GrammarSpec(kind=GrammarKind.CHOICE, source=_written(field, value), field=field)
    if key == "structural_tag":
        source = _written(field, structural_tag_of(field, value))
        return GrammarSpec(kind=GrammarKind.STRUCTURAL_TAG, source=source, field=field)
    if not isinstance(value, str) or not value:
        raise FieldError(field, f" = {shown(value)}: expected a string, not empty")
    kind = GrammarKind.REGEX if key == "regex" else GrammarKind.EBNF
    return GrammarSpec(kind=kind, source=value, field=field)


def _written(field: str, value: Any) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except (OverflowError, RecursionError, UnicodeEncodeError):
        problem = ": expected numbers of at most 64 bits, valid Unicode and little nesting"
        raise FieldError(field, problem) from None
