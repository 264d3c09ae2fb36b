"""What the output has to look like, in the forms of TensorRT-LLM and of vLLM."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from helpers.tiny_tokenizers import tiny_tokenizer, write_tokenizer
from helpers.triton_server_doubles import LIMITS, FakeSource, llm_source
from helpers.vllm_requests import make_reader, params
from naiad.errors import InvalidRequestError
from naiad.frontend.request import GenerateRequest
from naiad.sequence import GrammarKind, GrammarSpec
from naiad.tokenization import Tokenizer
from naiad.triton_server.requests.llm import read_request
from naiad.triton_server.requests.vllm import VLLMRequestReader

SCHEMA = '{"type": "object"}'
TAG = {"structures": [{"begin": "<n>", "schema": {"type": "integer"}, "end": "</n>"}], "triggers": ["<n"]}
TYPE, GUIDE = "guided_decoding_guide_type", "guided_decoding_guide"


def guided(**fields: Any) -> GenerateRequest:
    request = read_request(llm_source(**fields), LIMITS)
    assert isinstance(request, GenerateRequest)
    return request


@pytest.mark.parametrize(
    ("guide_type", "guide", "kind"),
    [
        ("json", "", GrammarKind.JSON_OBJECT),
        ("json_schema", SCHEMA, GrammarKind.JSON_SCHEMA),
        ("regex", "a+é", GrammarKind.REGEX),
        ("ebnf_grammar", 'root ::= "a"', GrammarKind.EBNF),
    ],
)
def test_a_guide_is_read(guide_type: str, guide: str, kind: GrammarKind) -> None:
    expected = GrammarSpec(kind=kind, source=guide, field=GUIDE)
    fields = {TYPE: guide_type.encode()} | ({GUIDE: guide.encode()} if guide else {})
    assert guided(**fields).rows[0].params.grammar == expected
    parameters = {TYPE: guide_type} | ({GUIDE: guide} if guide else {})
    by_parameters = read_request(FakeSource(llm_source().tensors(), parameters), LIMITS)
    assert isinstance(by_parameters, GenerateRequest)
    assert by_parameters.rows[0].params.grammar == expected


def test_empty_fields_ask_for_nothing() -> None:
    assert guided(**{TYPE: b"", GUIDE: b""}).rows[0].params.grammar is None
    assert guided().rows[0].params.grammar is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({TYPE: b"structural_tag", GUIDE: b"{}"}, f"{TYPE} = 'structural_tag': expected json or json_schema"),
        ({TYPE: b"regex"}, f"{GUIDE}: expected a text with {TYPE} = regex"),
        ({TYPE: b"json", GUIDE: b"{}"}, f"{GUIDE}: expected none with {TYPE} = json"),
        ({GUIDE: b"{}"}, f"{GUIDE} was sent without {TYPE}: expected json or"),
        ({TYPE: b"regex", GUIDE: b"\xff"}, f"{GUIDE} is not valid UTF-8"),
        ({TYPE: b"regex", GUIDE: b"x" * 524_289}, f"{GUIDE} has 524289 bytes: at most 524288"),
        ({TYPE: b"x" * 33, GUIDE: b"x"}, f"{TYPE} has 33 bytes"),
        ({TYPE: b"json", "beam_width": 2}, f"beam_width = 2: expected 1 with {GUIDE}"),
    ],
)
def test_a_guide_that_is_not_allowed_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        guided(**fields)
    assert message in str(raised.value)


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> VLLMRequestReader:
    folder = write_tokenizer(tmp_path_factory.mktemp("tokenizer"), tiny_tokenizer("byte_level"))
    return make_reader(Tokenizer.from_directory(folder))


def asked(reader: VLLMRequestReader, keys: dict[str, Any]) -> GrammarSpec | None:
    return params(reader, keys).grammar


@pytest.mark.parametrize("name", ["structured_outputs", "guided_decoding"])
@pytest.mark.parametrize(
    ("value", "kind", "key", "source"),
    [
        ({"json": {"type": "object"}}, GrammarKind.JSON_SCHEMA, "json", '{"type":"object"}'),
        ({"json": SCHEMA, "backend": "guidance"}, GrammarKind.JSON_SCHEMA, "json", SCHEMA),
        ({"json_object": True, "regex": None}, GrammarKind.JSON_OBJECT, "json_object", ""),
        ({"regex": "a+", "json_object": False}, GrammarKind.REGEX, "regex", "a+"),
        ({"choice": ["a", "é"], "disable_any_whitespace": True}, GrammarKind.CHOICE, "choice", '["a","é"]'),
        ('{"grammar": "root ::= \\"a\\""}', GrammarKind.EBNF, "grammar", 'root ::= "a"'),
    ],
)
def test_vllms_object_is_read(
    reader: VLLMRequestReader, name: str, value: Any, kind: GrammarKind, key: str, source: str
) -> None:
    assert asked(reader, {name: value}) == GrammarSpec(kind=kind, source=source, field=f"{name}.{key}")


@pytest.mark.parametrize("value", [TAG, TAG | {"type": "structural_tag"}, msgspec.json.encode(TAG).decode()])
def test_a_structural_tag_is_an_object_or_its_text(reader: VLLMRequestReader, value: Any) -> None:
    found = asked(reader, {"structured_outputs": {"structural_tag": value}})
    assert found is not None
    assert (found.kind, found.field) == (GrammarKind.STRUCTURAL_TAG, "structured_outputs.structural_tag")
    assert msgspec.json.decode(found.source) == TAG


@pytest.mark.parametrize(
    "value", [None, {}, "", {"structural_tag": ""}, {"json": None}, {"json_object": False, "backend": None}]
)
def test_an_object_without_a_form_asks_for_nothing(reader: VLLMRequestReader, value: Any) -> None:
    assert asked(reader, {"structured_outputs": value}) is None


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"structured_outputs": {"regex": "a", "json": {}}}, "has json and regex: expected one of them"),
        ({"structured_outputs": {"regx": "a"}}, "unknown key 'regx': allowed are json, json_object,"),
        ({"structured_outputs": []}, "structured_outputs = []: expected an object"),
        ({"structured_outputs": "{"}, "structured_outputs = '{': expected an object"),
        ({"structured_outputs": "[" * 100_000}, "structured_outputs = '[[["),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex = 5: expected a string"),
        (
            {"structured_outputs": {"regex": ""}},
            "structured_outputs.regex = '': expected a string, not empty",
        ),
        ({"structured_outputs": {"json": 5}}, "structured_outputs.json = 5: expected a JSON schema"),
        ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object = 1: expected true"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice = []: expected a list"),
        ({"structured_outputs": {"choice": ["a", 1]}}, "structured_outputs.choice = ['a', 1]"),
        ({"structured_outputs": {"choice": ["x" * 600_000]}}, "choice is too long: at most 524288 bytes"),
        (
            {"structured_outputs": {"structural_tag": "{}"}},
            "structural_tag.structures = None: expected a list",
        ),
        ({"structured_outputs": {"structural_tag": "{"}}, "structural_tag = '{': expected an object, or"),
        (
            {"structured_outputs": {"structural_tag": {"type": "structural_tag", "format": {}}}},
            "structural_tag.format is not supported: expected structures and triggers",
        ),
        (
            {"structured_outputs": {"structural_tag": {**TAG, "at_least_one": True}}},
            "structural_tag: unknown key 'at_least_one': allowed are type, structures, triggers",
        ),
        (
            {"structured_outputs": {"structural_tag": {**TAG, "structures": [{"begin": "<n>"}]}}},
            "structural_tag.structures[0].end = None: expected a string",
        ),
        (
            {"structured_outputs": {"structural_tag": {**TAG, "triggers": [""]}}},
            "structural_tag.triggers[0] = '': expected a string, not empty",
        ),
        ({"guided_decoding": {"regex": "a", "backend": "outlines"}}, "guided_decoding.backend = 'outlines'"),
        ({"guided_decoding": {"whitespace_pattern": " *"}}, "guided_decoding.whitespace_pattern = ' *'"),
        (
            {"structured_outputs": {"json": {}, "disable_additional_properties": True}},
            "disable_additional_properties = True is not supported: expected false, or null",
        ),
        (
            {"structured_outputs": {"regex": "a"}, "guided_decoding": {"regex": "a"}},
            "structured_outputs and guided_decoding were sent: expected one of them",
        ),
    ],
)
def test_an_object_that_is_not_allowed_is_refused(
    reader: VLLMRequestReader, keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        asked(reader, keys)
    assert message in str(raised.value)
