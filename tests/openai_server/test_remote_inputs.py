"""Which tensors say a request, with tokenizers that add tokens and whose texts are ambiguous."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from helpers.tiny_tokenizers import KINDS, tiny_tokenizer, write_tokenizer
from naiad.frontend.field import Frontend
from naiad.frontend.fields import fields_at
from naiad.frontend.limits import ModelLimits
from naiad.frontend.prompt import PromptEncoder
from naiad.openai_server.api.bodies import ChatBody, CompletionBody
from naiad.openai_server.api.errors import APIError
from naiad.openai_server.api.reading import AskedGeneration, RequestReader
from naiad.openai_server.api.refusals import Refusal, refuse, remote_refusals
from naiad.openai_server.engines.remote.inputs import _guide, check_owner, row_inputs
from naiad.openai_server.engines.remote.shape import ModelShape
from naiad.sequence import GrammarKind, GrammarSpec
from naiad.tokenization import Tokenizer

SHAPE = ModelShape(
    name="text",
    inputs=frozenset(fields_at(Frontend.TEXT)),
    has_rows=True,
    adds_special_tokens=True,
    skips_special_tokens=True,
    max_model_len=0,
)
TEXTS = ("Hello", "  two spaces", "<s>begins itself", "你好", "a\n", "stop </s> it")


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def reader(kind: str, tmp_path_factory: pytest.TempPathFactory) -> RequestReader:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = Tokenizer.from_directory(write_tokenizer(folder, tiny_tokenizer(kind)))
    size = len(tokenizer.table)
    limits = ModelLimits(max_model_len=512, vocab_size=size, eos_token_ids=(2,), exclude_input_in_output=True)
    return RequestReader(PromptEncoder(tokenizer, 512, size), limits, refusals=remote_refusals())


def completion(reader: RequestReader, **fields: Any) -> AskedGeneration:
    return reader.completion(CompletionBody(model="text", **fields), "id")


def sent(asked: AskedGeneration, reader: RequestReader, shape: ModelShape = SHAPE) -> dict[str, Any]:
    """Name → the values of each tensor that says the first prompt."""
    made: dict[str, Any] = {}
    for tensor in row_inputs(asked, 0, shape, reader.encoder):
        raw = tensor._get_content()
        made[tensor.name()] = raw[4:].decode() if tensor.datatype() == "BYTES" else raw
    return made


def text_for(asked: AskedGeneration, reader: RequestReader, shape: ModelShape = SHAPE) -> str | None:
    """The text that is sent for the first prompt; None if the request is refused."""
    try:
        return str(sent(asked, reader, shape)["text_input"])
    except APIError as error:
        refused = error
    assert (refused.status, refused.param) == (400, asked.text_form.prompt_name)
    return None


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_is_sent_as_it_is(reader: RequestReader, text: str) -> None:
    assert sent(completion(reader, prompt=text), reader)["text_input"] == text


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("adds", [False, True])
def test_ids_are_sent_as_a_text_with_just_these_ids_or_refused(
    reader: RequestReader, kind: str, text: str, adds: bool
) -> None:
    tokenizer = reader.encoder.tokenizer
    ids = tokenizer.encode(text, adds)
    asked = completion(reader, prompt=ids)
    assert asked.request.rows[0].prompt_token_ids == ids
    found = text_for(asked, reader)
    if found is None:
        assert kind != "byte_level"
    else:
        assert tokenizer.encode(found, add_special_tokens=True) == ids


def test_a_chat_is_sent_as_messages(reader: RequestReader) -> None:
    asked = reader.chat(ChatBody(model="text", messages=[{"role": "user", "content": "<s>Hi"}]), "id")
    assert "text_input" not in sent(asked, reader)
    assert "Hi" in sent(asked, reader)["messages"]


def test_a_chat_of_a_model_without_messages_is_rendered_or_refused(reader: RequestReader, kind: str) -> None:
    shape = replace(SHAPE, inputs=SHAPE.inputs - {"messages"})
    tokenizer = reader.encoder.tokenizer
    for content in ("Hi", "<|im_end|>"):
        asked = reader.chat(ChatBody(model="text", messages=[{"role": "user", "content": content}]), "id")
        text = text_for(asked, reader, shape)
        if text is None:
            assert (kind, content) != ("byte_level", "Hi")
        else:
            # Content that looks like a special token must not become one.
            assert (kind, content) != ("byte_level", "<|im_end|>")
            assert tokenizer.encode(text, True) == asked.request.rows[0].prompt_token_ids


def test_defaults_are_sent_and_what_asks_for_nothing_is_not(reader: RequestReader) -> None:
    names = set(sent(completion(reader, prompt="Hello", stop_token_ids=[], stream=True), reader))
    assert {"temperature", "top_p", "max_tokens", "stream", "exclude_input_in_output", "end_id"} <= names
    assert not names & {"stop_token_ids", "priority", "cache_salt", "seed"}


def test_a_keys_priority_and_salt_are_sent(reader: RequestReader) -> None:
    asked = completion(reader, prompt="Hello")
    (row,) = asked.request.rows
    owned = replace(
        asked, request=replace(asked.request, rows=[replace(row, cache_salt="of the key", tenant="acme")])
    )
    check_owner(owned)
    assert sent(owned, reader)["cache_salt"] == "of the key"


def test_many_salts_under_one_key_are_refused(reader: RequestReader) -> None:
    asked = completion(reader, prompt="Hello", cache_salt="mine")
    check_owner(asked)
    (row,) = asked.request.rows
    owned = replace(asked, request=replace(asked.request, rows=[replace(row, tenant="acme")]))
    with pytest.raises(APIError) as refused:
        check_owner(owned)
    assert refused.value.param == "cache_salt"


@pytest.mark.parametrize(
    ("allowed", "value", "asks"),
    [
        ((False,), None, False),
        ((False,), False, False),
        ((False,), True, True),
        ((False,), 0, True),
        ((), 0, True),
        ((), None, False),
    ],
)
def test_only_the_very_value_asks_for_nothing(allowed: tuple[Any, ...], value: Any, asks: bool) -> None:
    assert Refusal("name", allowed, "reason").asks(value) is asks


def test_a_refusal_says_the_name_of_another_api() -> None:
    body = ChatBody(model="text", messages=[], logprobs=True)
    with pytest.raises(APIError) as refused:
        refuse(body, remote_refusals(), {"logprobs": "include"})
    assert refused.value.param == "include"
    assert refused.value.message.startswith(
        "include = True is not supported: expected no value or False, as "
    )


SCHEMA = '{"type": "integer"}'


@pytest.mark.parametrize(
    ("form", "guide_type", "guide"),
    [
        ({"response_format": {"type": "json_object"}}, "json", None),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", SCHEMA),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
        ({"structured_outputs": {"choice": ["a.b", "c|d 1"]}}, "regex", "a\\.b|c\\|d 1"),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, "ebnf_grammar", 'root ::= "a"'),
    ],
)
def test_formats_become_guides(
    reader: RequestReader, form: dict[str, Any], guide_type: str, guide: str | None
) -> None:
    tensors = sent(completion(reader, prompt="Hello", **form), reader)
    assert tensors["guided_decoding_guide_type"] == guide_type
    assert tensors.get("guided_decoding_guide") == guide


def test_a_choice_is_the_same_as_a_regular_expression() -> None:
    texts = ["".join(map(chr, range(33, 127))), "a b", "é\n"]
    for text in texts:
        (pattern,) = [_guide(GrammarSpec(kind=GrammarKind.CHOICE, source=json.dumps([text])), SHAPE)]
        assert re.fullmatch(pattern["guided_decoding_guide"], text)


@pytest.mark.parametrize(
    "grammar",
    [
        GrammarSpec(kind=GrammarKind.LARK, source='start: "a"', field="tools"),
        GrammarSpec(kind=GrammarKind.JSON_OBJECT, begins_after="</think>", field="tools"),
    ],
)
def test_grammars_that_no_guide_says_are_refused(grammar: GrammarSpec) -> None:
    with pytest.raises(APIError) as refused:
        _guide(grammar, SHAPE)
    assert (refused.value.param, refused.value.code) == ("tools", "unsupported_value")
    assert "remote model text" in refused.value.message


def test_a_model_without_guides_takes_no_format() -> None:
    shape = replace(SHAPE, inputs=SHAPE.inputs - {"guided_decoding_guide"})
    with pytest.raises(APIError):
        _guide(GrammarSpec(kind=GrammarKind.JSON_OBJECT, field="response_format"), shape)
