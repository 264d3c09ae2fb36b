"""Which keywords of schemas are known, what is dropped if they are passed over, and whose references end."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import pytest

from naiad.grammar.json_schema import check_structure, drop_unknown_keywords, read_schema

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


A = {"$ref": "#/$defs/A"}
ENDLESS: list[tuple[dict[str, Any], str]] = [
    ({**A, "$defs": {"A": A}}, "#/$defs/A"),
    ({**A, "$defs": {"A": {"title": "A", "type": "object", **A}}}, "#/$defs/A"),
    ({"$ref": "#"}, "#"),
    ({"$ref": "#/definitions/A", "definitions": {"A": {"$ref": "#/definitions/A"}}}, "#/definitions/A"),
    ({**A, "$defs": {"A": {"allOf": [{"minimum": 1}, A]}}}, "#/$defs/A"),
    ({**A, "$defs": {"A": {"anyOf": [A]}}}, "#/$defs/A"),
    ({"type": "object", "properties": {"a": {"items": A}}, "$defs": {"A": A}}, "#/$defs/A"),
    ({"properties": {"a": {"$ref": "#/properties/a"}}}, "#/properties/a"),
    ({"prefixItems": [True, {"$ref": "#/prefixItems/1"}]}, "#/prefixItems/1"),
    ({"$defs": {"a/b c~": {"$ref": "#/$defs/a~1b%20c~0"}}}, "#/$defs/a~1b%20c~0"),
    ({"$id": "http://example.org/a", **A, "$defs": {"A": A}}, "#/$defs/A"),
]


@pytest.mark.parametrize(("schema", "ref"), ENDLESS)
def test_a_reference_that_leads_back_to_itself_is_refused(schema: dict[str, Any], ref: str) -> None:
    expected = re.escape(f"$ref = {ref!r} leads back to itself for the same value: expected references that")
    with pytest.raises(ValueError, match=expected):
        read_schema(json.dumps(schema))
    with pytest.raises(ValueError, match=expected):
        check_structure(schema)


def test_one_reference_of_a_longer_way_back_is_named() -> None:
    size = 5000
    ring: dict[str, Any] = {f"{each}": {"$ref": f"#/$defs/{(each + 1) % size}"} for each in range(size)}
    with pytest.raises(ValueError, match=r"\$ref = '#/\$defs/\d+' leads back to itself"):
        read_schema(json.dumps({"type": "integer", "$defs": ring}))
    ring["0"] = {"type": "integer"}
    read_schema(json.dumps({"$ref": "#/$defs/1", "$defs": ring}))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"child": {"$ref": "#"}}},
        {**A, "$defs": {"A": {"type": "array", "items": A}}},
        {**A, "$defs": {"A": {"type": "object", "additionalProperties": A}}},
        {**A, "$defs": {"A": {"anyOf": [{"type": "integer"}, A]}}},
        {**A, "$defs": {"A": {"anyOf": [{"type": "null"}, {"type": "array", "prefixItems": [A]}]}}},
        {"allOf": [A, A, {"$ref": "#/$defs/B"}], "$defs": {"A": {"$ref": "#/$defs/B"}, "B": {"minimum": 1}}},
        # What llguidance refuses by itself, or reads otherwise than as a place in the whole.
        {"$ref": "#/$defs/missing"},
        {"$ref": "#/allOf/9/x", "allOf": [{}]},
        {"$ref": "#/allOf/" + "9" * 5000, "allOf": [{}]},
        {"$ref": "#anchor"},
        {"$ref": 5},
        {"$defs": {"A": {"$id": "http://example.org/a", **A, "$defs": {"A": {"type": "integer"}}}}},
        # A property and a value may look like references.
        {"properties": {"$ref": {"type": "string"}}, "const": {"$ref": "#"}},
    ],
)
def test_other_references_are_none_of_these(schema: dict[str, Any]) -> None:
    read_schema(json.dumps(schema))
    check_structure(schema)
