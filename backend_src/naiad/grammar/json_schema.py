"""Finds in JSON schemas what would be ignored, would cost too much, or would never come to an end."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from naiad.grammar.limits import MAX_OPTIONAL_PROPERTIES
from naiad.grammar.patterns import rewrite_patterns
from naiad.grammar.references import check_references
from naiad.grammar.schema_values import check_values


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
        ValueError: it is not JSON or not a schema, or it has a keyword that JSON Schema does not have, or too
            many properties that may be left out, or a `$ref` that leads back to itself; the message says
            which.
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
    for each in _schemas(schema):
        for keyword in each:
            if not _is_known(keyword):
                raise ValueError(f"unknown keyword {keyword[:_MAX_SHOWN]!r}")
        _check_num_optional(each)
        check_values(each)
    check_references(schema, _schemas(schema))
    return schema


def check_structure(schema: Mapping[str, Any]) -> None:
    """Check a schema whose keywords may be any.

    Raises:
        ValueError: an object has too many properties that may be left out, or a `$ref` leads back to itself.
    """
    for each in _schemas(schema):
        _check_num_optional(each)
    check_references(schema, _schemas(schema))


def refs_in(schema: Mapping[str, Any]) -> Iterator[str]:
    """Yield the `$ref` of the schema and of each schema in it."""
    return (ref for each in _schemas(schema) if isinstance(ref := each.get("$ref"), str))


def schema_text(source: str) -> str:
    """Check a schema; return it as llguidance has to read it.

    Raises:
        ValueError: as `read_schema`.
    """
    schema = read_schema(source)
    if schema is True:
        return "{}"
    return _with_patterns(schema) or source


def with_patterns(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema, or a copy of it in which patterns are written as llguidance has to read them."""
    copied = json.loads(json.dumps(schema))
    return copied if _with_patterns(copied) else schema


def _with_patterns(schema: dict[str, Any]) -> str:
    """Rewrite a schema's patterns; return its text, or "" if nothing has changed."""
    if sum(rewrite_patterns(each) for each in _schemas(schema)) == 0:
        return ""
    try:
        return json.dumps(schema)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def drop_unknown_keywords(schema: Any) -> list[str]:
    """Remove the keywords that JSON Schema does not have, which it calls annotations.

    Args:
        schema: parsed JSON, which is changed.

    Returns:
        The keywords, as often as they were there.
    """
    dropped = []
    for each in _schemas(schema):
        unknown = [
            keyword for keyword in each if not _is_known(keyword) and not _is_older_id(keyword, each, schema)
        ]
        for keyword in unknown:
            del each[keyword]
        dropped += unknown
    return dropped


def _check_num_optional(schema: dict[str, Any]) -> None:
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, dict):
        return
    names = {each for each in required if isinstance(each, str)} if isinstance(required, list) else set()
    number = len(properties.keys() - names)
    if number > MAX_OPTIONAL_PROPERTIES:
        most = f"at most {MAX_OPTIONAL_PROPERTIES} are allowed"
        raise ValueError(f"an object has {number} properties that may be left out: {most}")


def _is_known(keyword: str) -> bool:
    return keyword in _KNOWN or (keyword != _OBEYED_EXTENSION and keyword.startswith(_EXTENSION))


def _is_older_id(keyword: str, each: dict[str, Any], schema: Any) -> bool:
    """Whether it is draft 4's `$id`, which `read_schema` takes."""
    return keyword == "id" and each is schema


def _schemas(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield a schema and all schemas in it."""
    left = [schema]
    while left:
        each = left.pop()
        if not isinstance(each, dict):
            continue
        yield each
        for keyword, value in each.items():
            if keyword in _SCHEMA_MAPS and isinstance(value, dict):
                left += value.values()
            elif keyword in _SCHEMA_LISTS and isinstance(value, list):
                left += value
            elif keyword in _ONE_SCHEMA:
                left.append(value)
