"""Tools in the messages themselves, where the template of Phi-4-mini looks for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from helpers.called_tools import heard
from helpers.tiny_tokenizers import CHAT_TEMPLATE, byte_level_tokenizer, write_tokenizer
from naiad.openai_server.api.parsing.call_finder import CallRules
from naiad.openai_server.api.parsing.output_parser import OutputParser, Section, grammar_of
from naiad.openai_server.api.parsing.pieces import Piece
from naiad.tokenization import Tokenizer
from naiad.tokenization.chat_template import ChatOptions

# It has the form of Phi-4-mini's.
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'system' and 'tools' in message"
    " and message['tools'] is not none %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|tool|>'"
    " + message['tools'] + '<|/tool|>' + '<|end|>' }}{% else %}{{ '<|' + message['role'] + '|>'"
    " + message['content'] + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
MARKS = [
    *("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|tool|>", "<|/tool|>"),
    *("<|tool_call|>", "<|/tool_call|>", "<|tool_response|>"),
]
WEATHER = {"name": "weather", "description": "né <|end|>", "parameters": {"type": "object"}}
TOOLS = ({"type": "function", "function": WEATHER},)
USER = {"role": "user", "content": "Rain?"}
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rom<|end|>"}}}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    made = byte_level_tokenizer()
    made.add_special_tokens([AddedToken(each, normalized=False, special=True) for each in MARKS])
    return Tokenizer.from_directory(write_tokenizer(tmp_path_factory.mktemp("phi"), made, TEMPLATE))


def shown(tokenizer: Tokenizer, *messages: dict[str, Any], tools: Any = TOOLS) -> tuple[str, list[str]]:
    """The prompt's text, and the special tokens in it."""
    options = ChatOptions(tools=tools, speaks_tools=True)
    ids = tokenizer.render_chat(json.dumps(messages), options)
    text = b"".join(tokenizer.table.visible_bytes(each, False) for each in ids).decode()
    names = {tokenizer.token_id(mark): mark for mark in MARKS}
    return text, [names[each] for each in ids if each in names]


def test_the_systems_message_has_the_tools(tokenizer: Tokenizer) -> None:
    assert tokenizer.takes_tools
    text, marks = shown(tokenizer, {"role": "system", "content": "Be brief."}, USER)
    written = json.dumps([WEATHER], ensure_ascii=False)
    expected = f"<|system|>Be brief.<|tool|>{written}<|/tool|><|end|><|user|>Rain?<|end|><|assistant|>"
    assert text == expected
    # What a tool says of itself is no special token.
    assert marks == ["<|system|>", "<|tool|>", "<|/tool|>", "<|end|>", "<|user|>", "<|end|>", "<|assistant|>"]


def test_without_a_message_of_the_system_there_is_an_empty_one(tokenizer: Tokenizer) -> None:
    text, _ = shown(tokenizer, USER)
    assert text.startswith('<|system|><|tool|>[{"name": "weather"')
    text, _ = shown(tokenizer, USER, tools=())
    assert text == "<|user|>Rain?<|end|><|assistant|>"


def test_calls_and_results_are_contents(tokenizer: Tokenizer) -> None:
    asked = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    told = {"role": "tool", "content": "wet <|user|>", "tool_call_id": "1"}
    text, marks = shown(tokenizer, USER, asked, told, tools=())
    call = '[{"name": "weather", "arguments": {"city": "Rom<|end|>"}}]'
    assert text == (
        f"<|user|>Rain?<|end|><|assistant|><|tool_call|>{call}<|/tool_call|><|end|>"
        "<|tool_response|>wet <|user|><|end|><|assistant|>"
    )
    assert marks == [
        *("<|user|>", "<|end|>", "<|assistant|>", "<|tool_call|>", "<|/tool_call|>", "<|end|>"),
        *("<|tool_response|>", "<|end|>", "<|assistant|>"),
    ]


def test_a_call_as_the_prompt_shows_them_is_read(tokenizer: Tokenizer) -> None:
    outputs = grammar_of(tokenizer)
    assert outputs.calls is not None
    assert outputs.calls.name == "phi4_mini_json"
    begin, end = (tokenizer.token_id(mark) for mark in ("<|tool_call|>", "<|/tool_call|>"))
    assert begin is not None
    assert end is not None
    parser = OutputParser(
        outputs, Section.CONTENT, CallRules(family=outputs.calls, tools={"weather": {"type": "object"}})
    )
    call = '[{"name": "weather", "arguments": {"city": "Rom"}}]'
    found = heard(parser, [[Piece("", begin)], [Piece(call, 5)], [Piece("", end)]])
    assert (found.calls, found.content) == ([("weather", '{"city": "Rom"}')], "")


def test_other_templates_are_left_alone(tmp_path: Path) -> None:
    made = Tokenizer.from_directory(write_tokenizer(tmp_path, byte_level_tokenizer(), CHAT_TEMPLATE))
    assert not made.takes_tools
