"""Which keywords of a schema are known, and what is dropped of one that is passed over."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from naiad.grammar.json_schema import drop_unknown_keywords, read_schema

NESTED = {
    "id": "http://example.org/older",
    "self": {"vendor": "a"},
    "type": "object",
    "properties": {"self": {"type": "string", "_format": "x"}, "order": {"enum": [{"version": 1}]}},
    "$defs": {"a": {"anyOf": [{"requierd": ["b"]}, {"items": {"order": 1}}], "x-own": 1}},
    "additionalProperties": False,
    "required": ["self"],
    "default": {"colour": "red"},
}


def test_unknown_keywords_are_dropped_and_nothing_else() -> None:
    schema: dict[str, Any] = copy.deepcopy(NESTED)
    assert sorted(drop_unknown_keywords(schema)) == ["_format", "order", "requierd", "self"]
    # A property may have any name, and values are not schemas.
    assert schema == {
        "id": "http://example.org/older",
        "type": "object",
        "properties": {"self": {"type": "string"}, "order": {"enum": [{"version": 1}]}},
        "$defs": {"a": {"anyOf": [{}, {"items": {}}], "x-own": 1}},
        "additionalProperties": False,
        "required": ["self"],
        "default": {"colour": "red"},
    }
    assert drop_unknown_keywords(schema) == []
    read_schema(json.dumps(schema))


@pytest.mark.parametrize("schema", [True, False, None, 3, [], "text"])
def test_what_is_no_schema_is_left_to_the_reader(schema: Any) -> None:
    assert drop_unknown_keywords(schema) == []


def test_an_extension_that_would_be_obeyed_is_dropped_too() -> None:
    schema = {"x-guidance": {"whitespace_pattern": "x*"}, "x-other": 1}
    assert drop_unknown_keywords(schema) == ["x-guidance"]
    assert schema == {"x-other": 1}
