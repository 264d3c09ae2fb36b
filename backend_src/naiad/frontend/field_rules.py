"""What holds between fields: aliases, what goes with a beam search, and what is refused altogether."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

from naiad.errors import InvalidRequestError
from naiad.frontend.field import Field, FieldError, Frontend, Scalar
from naiad.frontend.fields import FIELD, FIELDS, known_parameters

_SERVERS_OWN_PARAMETERS = re.compile(r"id|timeout|sequence_\w+|triton_\w+|binary_data_output")
_ALIASES = tuple(field for field in FIELDS if field.alias_of)
_LIMITED_WITH_BEAMS = tuple(field for field in FIELDS if field.is_scalar and field.with_beams is not None)
_LIMITED_WITHOUT_BEAMS = tuple(field for field in FIELDS if field.without_beams is not None)
# Served nowhere that takes rows: refused there under whatever name they come.
_NOT_SERVED: Mapping[str, Field] = {
    name: field
    for field in FIELDS
    if not field.served
    for name in (field.name_at(Frontend.TEXT), field.name_at(Frontend.LLM))
    if name
}

T = TypeVar("T")


def required(sent: Mapping[str, T], name: str) -> T:
    """A field that must be there: the server's core lets requests without it through.

    Raises:
        FieldError: it was not sent.
    """
    if name not in sent:
        raise FieldError(name, " is missing: it is required")
    return sent[name]


def refuse_unknown_parameters(parameters: Mapping[str, Any], frontend: Frontend, forwarded: str) -> None:
    """Refuse parameters that nobody would read.

    Args:
        parameters: the request's parameters.
        frontend: that they were sent to.
        forwarded: regular expression of header names that the server forwards; "" = none.

    Raises:
        InvalidRequestError: names the parameter and those that are allowed.
    """
    known = _KNOWN_PARAMETERS[frontend]
    for name in parameters:
        if name in known or name in _NOT_SERVED or _SERVERS_OWN_PARAMETERS.fullmatch(name):
            continue
        if forwarded and re.fullmatch(forwarded, name):
            continue
        raise InvalidRequestError(
            f"unknown parameter {name[:80]!r}: allowed are {', '.join(sorted(known))}, id, timeout"
        )


def refuse_unserved(sent: Mapping[str, Any], fields: Mapping[str, Field] = _NOT_SERVED) -> None:
    """Refuse each field that is not served and asks for something.

    Args:
        sent: tensors (arrays [rows, …]) or parameters (plain values) by name.
        fields: those that the frontend has, by the same names.

    Raises:
        FieldError: names the field.
    """
    for name, value in sent.items():
        field = fields.get(name)
        if field is not None and not field.served and not field.asks_for_nothing(value):
            raise field.error(" is not supported by this version of Naiad: do not send it")


def merge_aliases(values: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """The values under the fields' own names.

    Args:
        values: field name → checked value, also of aliases.

    Raises:
        FieldError: a field and its alias have different values.
    """
    merged = dict(values)
    for alias in _ALIASES:
        if alias.name not in merged:
            continue
        value = merged.pop(alias.name)
        sent = merged.setdefault(alias.alias_of, value)
        if sent != value:
            raise FieldError(
                alias.alias_of,
                f" = {sent} and {alias.name} = {value}: expected one of them, or the same value",
            )
    return merged


def check_beams(values: Mapping[str, Scalar]) -> None:
    """Refuse scalars that do not go with the request's beam search, or that need one that it does not have.

    Args:
        values: field name → checked value.

    Raises:
        FieldError: names the field, its value and what is allowed.
    """
    width = int(values.get("beam_width", 1))
    if width == 1:
        for field in _LIMITED_WITHOUT_BEAMS:
            allowed = field.without_beams or ()
            if values.get(field.name, *allowed[:1]) not in allowed:
                raise _not_allowed(field, values, allowed, "without beams (beam_width > 1)")
        return
    for field in _LIMITED_WITH_BEAMS:
        value = values.get(field.name)
        allowed = field.with_beams or ()
        if not value or value in allowed or field.is_off(value):
            continue
        if not allowed:
            problem = f" = {value!r} is not supported with beam_width = {width}: do not send it"
            raise field.error(problem)
        raise _not_allowed(field, values, allowed, f"with beam_width = {width}, as nothing is drawn")
    num_sequences = int(values.get("num_return_sequences", 1))
    if num_sequences > width:
        problem = f" = {num_sequences}: expected at most {width} with beam_width = {width}"
        raise FIELD["num_return_sequences"].error(problem)


def _not_allowed(
    field: Field, values: Mapping[str, Scalar], allowed: tuple[Scalar, ...], where: str
) -> FieldError:
    expected = [str(value) for value in allowed]
    if field.off is not None and field.off not in allowed:
        expected.append(f"at most {field.off}" if field.off_includes_less else str(field.off))
    return field.error(f" = {values[field.name]!r}: expected {' or '.join(expected)} {where}")


_KNOWN_PARAMETERS = {frontend: known_parameters(frontend) for frontend in Frontend}
