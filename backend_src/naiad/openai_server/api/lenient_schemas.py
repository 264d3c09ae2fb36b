"""Finds the JSON schemas of a body, and passes over the keywords in them that JSON Schema does not have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from naiad.grammar.json_schema import drop_unknown_keywords


def pass_over_keywords(sent: Mapping[str, Any]) -> list[str]:
    """Drop unknown keywords of all schemas in a body.

    Args:
        sent: the fields of a body; schemas in it are changed.

    Returns:
        What was dropped, as `field.keyword`.
    """
    return [
        f"{field}.{keyword}" for field, schema in _schemas(sent) for keyword in drop_unknown_keywords(schema)
    ]


def _schemas(sent: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the field in which a schema stands, and the schema."""
    yield "response_format", _at(sent, "response_format", "json_schema", "schema")
    yield "structured_outputs", _at(sent, "structured_outputs", "json")
    # The Responses API's.
    yield "text", _at(sent, "text", "format", "schema")
    tools = sent.get("tools")
    for tool in tools if isinstance(tools, list) else ():
        for path in (("function", "parameters"), ("parameters",), ("input_schema",)):
            yield "tools", _at(tool, *path)


def _at(value: Any, *path: str) -> Any:
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value
