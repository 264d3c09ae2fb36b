"""Finds values in JSON schemas that llguidance would change, or could not hold a text to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

# llguidance keeps numbers as doubles. Beyond this they have gaps, and it writes some with other digits.
MOST_EXACT = 2**53
# The greatest number of 64 bits, which it takes for the greatest integer that there is.
_MAX_INT64 = 2**63 - 1
_MAXIMUM = "maximum"
_BOUNDS = (_MAXIMUM, "minimum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_MAX_SHOWN_BITS = 256


def check_values(schema: Mapping[str, Any]) -> None:
    """Check a schema, without those in it.

    Raises:
        ValueError: it has a number that would be changed, or asks for more properties than keys that may
            repeat can make certain; the message says which.
    """
    for keyword in _BOUNDS:
        value = schema.get(keyword)
        if _is_number(value) and abs(value) > MOST_EXACT and not _is_int64_bound(schema, keyword):
            raise _inexact(keyword, value)
    for keyword in ("const", "enum"):
        for value in _values(schema.get(keyword)):
            # A fraction has no more digits than it can be told from others by.
            if isinstance(value, int) and abs(value) > MOST_EXACT:
                raise _inexact(keyword, value)
    _check_min_properties(schema)


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float)


def _is_int64_bound(schema: Mapping[str, Any], keyword: str) -> bool:
    """Whether it is the bound that schemas of 64-bit integers have, which is kept exactly."""
    types = schema.get("type")
    names = types if isinstance(types, list) else [types]
    is_integer = "integer" in names and "number" not in names
    return keyword == _MAXIMUM and schema[keyword] == _MAX_INT64 and is_integer


def _inexact(keyword: str, value: float) -> ValueError:
    is_long = isinstance(value, int) and value.bit_length() > _MAX_SHOWN_BITS
    shown = f"an integer of {value.bit_length()} bits" if is_long and isinstance(value, int) else str(value)
    return ValueError(f"{keyword} = {shown}: expected a number from {-MOST_EXACT} to {MOST_EXACT}")


def _values(value: Any) -> Iterator[Any]:
    """Yield a JSON value and all values in it."""
    left = [value]
    while left:
        each = left.pop()
        yield each
        if isinstance(each, dict):
            left += each.values()
        elif isinstance(each, list):
            left += each


def _check_min_properties(schema: Mapping[str, Any]) -> None:
    """Refuse a number of properties that one key could reach which is written several times.

    Keys that are required are there anyway; others may repeat, and also repeat those with escapes.
    """
    least, types = schema.get("minProperties"), schema.get("type", "object")
    has_others = schema.get("additionalProperties") is not False or bool(schema.get("patternProperties"))
    is_object = types == "object" or (isinstance(types, list) and "object" in types)
    if not (_is_number(least) and has_others and is_object):
        return
    required = schema.get("required")
    names = {each for each in required if isinstance(each, str)} if isinstance(required, list) else set()
    most = max(1, len(names))
    if least > most:
        raise ValueError(
            f"minProperties = {least} is not supported with properties that the schema does not name, as "
            f"their keys may repeat: expected at most {most}"
        )
