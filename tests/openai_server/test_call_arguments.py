"""What schemas say of the arguments of constrained calls is enforced, and read as meant, or refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from helpers.call_vocabulary import NOW, Vocabulary, parse, spec_of
from helpers.called_tools import FAMILY, heard
from naiad.openai_server.api.constraints.arguments import UnenforceableError, arguments_rule
from naiad.openai_server.api.constraints.lark import LarkWriter
from naiad.openai_server.api.errors import APIError
from naiad.openai_server.api.parsing.call_finder import CallRules
from naiad.openai_server.api.parsing.families import CallForm
from naiad.openai_server.api.parsing.output_parser import OutputParser, Section
from naiad.openai_server.api.parsing.pieces import Piece
from naiad.openai_server.api.tools import Tool


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    return Vocabulary(tmp_path_factory.mktemp("plain"))


def test_xml_arguments(plain: Vocabulary) -> None:
    spec = spec_of(plain.outputs("qwen3_coder"), is_required=True)
    call = (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nRo </x>\n\nme\n</parameter>\n{}"
        "<parameter=all>\nfalse\n</parameter>\n</function>\n</tool_call>"
    )
    unit = "<parameter=unit>\n{}\n</parameter>\n"
    assert plain.accepts(spec, call.format(""))
    assert plain.accepts(spec, call.format(unit.format("C")))
    assert not plain.accepts(spec, call.format(unit.format("K")))
    found = parse(plain.outputs("qwen3_coder"), call.format(unit.format("C")))
    assert json.loads(found.calls[0][1]) == {"city": "Ro </x>\n\nme", "unit": "C", "all": False}


def xml_call(value: str) -> str:
    return f"<tool_call>\n<function=f>\n<parameter=a>\n{value}\n</parameter>\n</function>\n</tool_call>"


STRING, NULL = {"type": "string"}, {"type": "null"}


@pytest.mark.parametrize(
    ("schema", "values"),
    [
        ({"type": ["string", "null"]}, {"Paris": "Paris", '"Paris"': '"Paris"', "null": None, "5": "5"}),
        ({"anyOf": [STRING, NULL]}, {"Paris": "Paris", "12345": "12345", "null": None}),
        ({"oneOf": [NULL, STRING], "default": None}, {"true": "true", "null": None}),
        ({"anyOf": [STRING, {"type": "integer"}]}, {"5": "5", "five": "five", "null": "null"}),
        ({"type": ["string", "null"], "enum": ["C", None]}, {"C": "C", "null": None, "F": ..., '"C"': ...}),
        ({"anyOf": [{"enum": ["C", "1"], **STRING}, NULL]}, {"1": "1", "null": None, "2": ...}),
        ({"type": ["integer", "null"]}, {"5": 5, "null": None, "five": ...}),
        ({"anyOf": [{"$ref": "#/$defs/x"}, NULL]}, {'"x"': "x", "null": None, "x": ...}),
    ],
)
def test_arguments_are_read_as_they_are_constrained(
    plain: Vocabulary, schema: dict[str, Any], values: dict[str, Any]
) -> None:
    """`...`: the text is not allowed."""
    defs = {"x": {"const": "x"}}
    parameters = {"type": "object", "properties": {"a": schema}, "required": ["a"], "$defs": defs}
    outputs = plain.outputs("qwen3_coder")
    spec = spec_of(outputs, tools=(Tool("f", "", parameters, is_strict=True),), is_required=True)
    rules = CallRules(family=FAMILY["qwen3_coder"], tools={"f": parameters}, are_certain=True)
    for written, value in values.items():
        assert plain.accepts(spec, xml_call(written)) is (value is not ...), written
        if value is ...:
            continue
        parser = OutputParser(outputs, Section.CONTENT, rules)
        ((_, arguments),) = heard(parser, [[Piece(each, 1)] for each in xml_call(written)] + [[]]).calls
        assert json.loads(arguments) == {"a": value}
        jsonschema.validate(json.loads(arguments), parameters)


@pytest.mark.parametrize(
    ("form", "parameters", "what"),
    [
        (
            CallForm.XML,
            {"properties": {"a": {"type": "string", "pattern": "x"}}},
            "pattern of the argument 'a'",
        ),
        (CallForm.XML, {"properties": {"a>": {}}}, "the argument 'a>'"),
        *(
            (CallForm.XML, {"properties": {"a": schema}}, f"{what} of the argument 'a'")
            for schema, what in (
                ({"type": ["string", "null"], "maxLength": 5}, "maxLength"),
                ({"anyOf": [{**STRING, "pattern": "x"}, NULL]}, "pattern"),
                ({"anyOf": [STRING, NULL], "enum": ["a"]}, "enum"),
                ({"anyOf": [STRING, {"type": "object"}]}, "the type object beside string"),
                ({"anyOf": [STRING, {"$ref": "#/$defs/x"}]}, "the type any beside string"),
                (
                    {"anyOf": [{**STRING, "enum": ["a"]}, {"type": "integer"}]},
                    "the type integer beside string",
                ),
                ({"type": ["string", "integer"], "enum": ["a", 5]}, "enum"),
                ({"oneOf": [STRING, {**STRING, "enum": ["a"]}]}, "oneOf"),
            )
        ),
        (CallForm.PYTHON, {"properties": {"a-b": {}}}, "the argument 'a-b'"),
        *(
            (form, {"properties": {"a": {"items": {"$ref": ref}}}}, f"ref = '{ref}', which is none")
            for form in (CallForm.PYTHON, CallForm.XML)
            for ref in ("#", "#/properties/a")
        ),
        (
            CallForm.PYTHON,
            {
                "properties": {"a": {"$ref": "#/$defs/x"}},
                "$defs": {"x": {"properties": {"b": {"$ref": "#"}}}},
            },
            "ref = '#', which is none",
        ),
        (CallForm.PYTHON, {"anyOf": []}, "anyOf"),
        (CallForm.XML, {"additionalProperties": {"type": "string"}}, "additionalProperties"),
    ],
)
def test_what_can_not_be_enforced_is_refused(form: CallForm, parameters: dict[str, Any], what: str) -> None:
    with pytest.raises(UnenforceableError, match=what):
        arguments_rule(LarkWriter({}), form, parameters, is_strict=True)


def test_the_error_names_the_tool(plain: Vocabulary) -> None:
    tool = Tool("f", "", {"properties": {"a-b": {}}}, is_strict=True)
    with pytest.raises(APIError) as refused:
        spec_of(plain.outputs("pythonic"), tools=(tool,))
    assert refused.value.param == "tools"
    assert "the tool f hold the argument 'a-b'" in refused.value.message


def optional(number: int) -> dict[str, Any]:
    return {"properties": {f"p{index}": {"type": "integer"} for index in range(number)}}


@pytest.mark.parametrize("family", ["hermes", "qwen3_coder", "pythonic"])
def test_schemas_of_tools_that_have_to_be_called_are_checked(plain: Vocabulary, family: str) -> None:
    outputs = plain.outputs(family)
    misspelt = Tool("f", "", {"properties": {"a": {"type": "integer", "minimun": 5}}})
    strict = replace(NOW, is_strict=True)
    ref = {"$ref": "#/$defs/A"}
    endless = Tool("f", "", {"properties": {"a": ref}, "required": ["a"], "$defs": {"A": ref}})
    for use, what in (
        (
            {"tools": (endless,), "is_required": True},
            r"the tool f: \$ref = '#/\$defs/A' leads back to itself",
        ),
        ({"tools": (endless, strict)}, r"the tool f: \$ref = '#/\$defs/A' leads back to itself"),
        ({"tools": (misspelt,), "is_required": True}, "the tool f: unknown keyword 'minimun'"),
        ({"tools": (replace(misspelt, is_strict=True),)}, "the strict tool f: unknown keyword 'minimun'"),
        ({"tools": (Tool("f", "", optional(451)),), "is_required": True}, "the tool f: an object has 451 "),
        ({"tools": (Tool("f", "", optional(451)), strict)}, "the tool f: an object has 451 properties"),
    ):
        with pytest.raises(APIError, match=f"the parameters of {what}") as refused:
            spec_of(outputs, **use)
        assert (refused.value.status, refused.value.param) == (400, "tools")
    # Another tool than the strict one need not be called.
    assert spec_of(outputs, tools=(misspelt, strict)) is not None
    assert spec_of(outputs, tools=(Tool("f", "", optional(450)),), is_required=True) is not None
