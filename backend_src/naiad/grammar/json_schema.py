"""Refuses JSON schemas with keywords that would be ignored."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Keywords that describe a value to people and programs, without restricting it.
_ANNOTATIONS = _words(
    "$schema $id $comment $anchor title description default examples example deprecated readOnly "
    "writeOnly discriminator"
)
# The keywords of JSON Schema that restrict values. llguidance names those that it does not support.
_ONE_SCHEMA = _words(
    "items additionalItems additionalProperties contains propertyNames not if then else "
    "unevaluatedItems unevaluatedProperties contentSchema"
)
_SCHEMA_LISTS = frozenset(("anyOf", "allOf", "oneOf", "prefixItems", "items"))
_SCHEMA_MAPS = frozenset(("properties", "patternProperties", "dependentSchemas", "$defs", "definitions"))
_VALUES = _words(
    "type const enum $ref $dynamicRef $dynamicAnchor $recursiveRef required minProperties "
    "maxProperties minItems maxItems uniqueItems minContains maxContains minLength maxLength pattern "
    "format minimum maximum exclusiveMinimum exclusiveMaximum multipleOf dependentRequired "
    "dependencies contentEncoding contentMediaType"
)
_KNOWN = _ANNOTATIONS | _ONE_SCHEMA | _SCHEMA_LISTS | _SCHEMA_MAPS | _VALUES
# Extensions, which JSON Schema leaves to applications as annotations; but llguidance obeys its own.
_EXTENSION, _OBEYED_EXTENSION = "x-", "x-guidance"
_MAX_SHOWN = 80


def read_schema(source: str) -> Any:
    """Parse a schema and check its keywords.

    Returns:
        The schema: an object, or true.

    Raises:
        ValueError: it is not JSON or not a schema, or it has a keyword that JSON Schema does not have; the
            message says which.
    """
    try:
        schema = msgspec.json.decode(source)
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise ValueError(f"it is not JSON: {error}") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(schema, dict | bool):
        raise ValueError("expected a JSON object, or true or false")
    if schema is False:
        raise ValueError("no text satisfies it")
    if isinstance(schema, dict) and isinstance(schema.get("id"), str):
        # Draft 4's `$id`. Further inside it would change what a `$ref` means.
        del schema["id"]
    for keyword in _keywords(schema):
        if keyword not in _KNOWN and (keyword == _OBEYED_EXTENSION or not keyword.startswith(_EXTENSION)):
            raise ValueError(f"unknown keyword {keyword[:_MAX_SHOWN]!r}")
    return schema


def _keywords(schema: Any) -> Iterator[str]:
    """Yield the keywords of a schema and of all schemas in it."""
    left = [schema]
    while left:
        each = left.pop()
        if not isinstance(each, dict):
            continue
        for keyword, value in each.items():
            yield keyword
            if keyword in _SCHEMA_MAPS and isinstance(value, dict):
                left += value.values()
            elif keyword in _SCHEMA_LISTS and isinstance(value, list):
                left += value
            elif keyword in _ONE_SCHEMA:
                left.append(value)
