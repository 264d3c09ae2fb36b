"""The Responses API and Anthropic's Messages API with tools and formats."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from helpers.messages_api import (
    COUNT,
    MESSAGES,
    Delta,
    Ending,
    Text,
    ToolUse,
    message_events,
    streamed_message,
    whole_message,
)
from helpers.openai_api import post, refused
from helpers.responses_api import (
    RESPONSES,
    calls_of,
    comparable,
    streamed_response,
    text_of,
    whole_response,
)
from helpers.scripted_model import REASONING_TEMPLATE, TOOL_TEMPLATE, Scripted, scripted_model
from naiad.openai_server.api.parsing.families import FamilyChoices
from naiad.sequence import FinishReason, GrammarKind

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "get_weather", "description": "Says the weather."}
FUNCTION = {"type": "function", **WEATHER, "parameters": PARAMETERS, "strict": None}
TOOL = {**WEATHER, "input_schema": PARAMETERS}
ARGUMENTS = '{"city": "Paris 😀"}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
CHOICES = "expected none, auto, required or {'type': 'function', 'name': NAME}."
FORM = {"type": "json_schema", "name": "x", "schema": SCHEMA}


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with scripted_model(tmp_path_factory.mktemp("apis"), REASONING_TEMPLATE) as script:
        yield script


def say(
    script: Scripted,
    text: str,
    reason: FinishReason = FinishReason.STOP,
    stop: str = "",
    at_once: int = 1,
) -> Any:
    script.texts, script.reason, script.stop, script.num_at_once = (text,), reason, stop, at_once
    return script


def response(script: Any, **fields: Any) -> dict[str, Any]:
    """The response, which is the same streamed and not."""
    sent = {"input": "Hello", **fields}
    found = whole_response(script, **sent)
    assert comparable(streamed_response(script, **sent)) == comparable(found)
    return found


def message(script: Any, **fields: Any) -> Any:
    """The message, which is the same streamed and not, with its blocks of calls apart from their ids."""
    sent = {"max_tokens": 500, "messages": [{"role": "user", "content": "Hello"}], **fields}
    found, other = whole_message(script, **sent), streamed_message(script, **sent)
    for each in (found, other):
        each.id = ""
        for block in each.content:
            if isinstance(block, ToolUse):
                assert block.id
                block.id = ""
    assert found == other
    return found


@pytest.mark.parametrize("at_once", [1, 4, 1000])
def test_a_response_has_items_for_calls(api: Any, at_once: int) -> None:
    text = f"<think>hm</think>Look. {CALL}{CALL} done"
    found = response(say(api, text, at_once=at_once), tools=[FUNCTION])
    kinds = [item["type"] for item in found["output"]]
    assert kinds == ["reasoning", "message", "function_call", "function_call", "message"]
    assert text_of(found) == "Look.  done"
    assert calls_of(found) == [("get_weather", ARGUMENTS)] * 2
    assert found["status"] == "completed"
    assert [item["status"] for item in found["output"]] == ["completed"] * 5
    assert len({item["id"] for item in found["output"]}) == 5
    assert (found["tools"], found["tool_choice"]) == ([FUNCTION], "auto")


def test_a_call_alone_has_no_message(api: Any) -> None:
    found = response(say(api, CALL), tools=[FUNCTION])
    assert [item["type"] for item in found["output"]] == ["function_call"]


def test_a_call_that_is_cut_off_is_incomplete(api: Any) -> None:
    say(api, CALL[:65], reason=FinishReason.LENGTH)
    found = response(api, tools=[FUNCTION], tool_choice="required")
    assert (found["status"], found["output"][0]["status"]) == ("incomplete", "incomplete")
    ((name, arguments),) = calls_of(found)
    assert name == "get_weather"
    assert arguments
    assert ARGUMENTS.startswith(arguments)
    assert api.params.grammar.kind is GrammarKind.LARK


def test_a_call_that_a_stop_string_cuts_off_is_incomplete(api: Any) -> None:
    fields = {"tools": [FUNCTION], "tool_choice": "required"}
    found = response(say(api, CALL + CALL[:65], stop="#"), **fields)
    assert (found["status"], found["incomplete_details"]) == ("incomplete", {"reason": None})
    assert [item["status"] for item in found["output"]] == ["completed", "incomplete"]
    (_, (_, arguments)) = calls_of(found)
    assert arguments
    assert arguments != ARGUMENTS
    found = response(say(api, CALL, stop="#"), **fields)
    assert (found["status"], found["incomplete_details"]) == ("completed", None)


def test_a_call_whose_form_is_read_as_a_whole_is_incomplete_too(tmp_path: Path) -> None:
    text = "<tool_call>\n<function=get_weather>\n<parameter=city>\nPar"
    with scripted_model(tmp_path, families=FamilyChoices(calls="qwen3_coder")) as script:
        found = response(say(script, text, stop="#"), tools=[FUNCTION], tool_choice="required")
    assert (found["status"], found["incomplete_details"]) == ("incomplete", {"reason": None})
    assert (calls_of(found), text_of(found)) == ([], text)


def test_a_named_function_is_called(api: Any) -> None:
    other = {"type": "function", "name": "now"}
    choice = {"type": "function", "name": "now"}
    found = response(
        say(api, CALL.replace("get_weather", "now")), tools=[FUNCTION, other], tool_choice=choice
    )
    assert calls_of(found) == [("now", ARGUMENTS)]
    assert found["tool_choice"] == choice
    assert '"now\\"' in api.params.grammar.source


def test_results_of_calls_are_items_of_the_input(api: Any) -> None:
    client = openai.OpenAI(base_url=api.openai, api_key="none", max_retries=0)
    say(api, f"Look.{CALL}")
    first = client.responses.create(model="first", input="Weather?", tools=[FUNCTION])  # type: ignore[list-item]
    call = first.output[-1]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}  # type: ignore[union-attr]
    items = [{"role": "user", "content": "Weather?"}, *(item.model_dump() for item in first.output), result]
    say(api, "It rains.")
    second = client.responses.create(model="first", input=items, tools=[FUNCTION])  # type: ignore[arg-type, list-item]
    assert second.output_text == "It rains."
    prompt = api.prompts[-1]
    assert prompt.count("<|im_start|>assistant") == 2
    sent_back = json.dumps({"name": "get_weather", "arguments": json.loads(ARGUMENTS)}, ensure_ascii=False)
    assert f"Look.<tool_call>{sent_back}#{call.call_id}" in prompt  # type: ignore[union-attr]
    assert f"rain#{call.call_id}" in prompt  # type: ignore[union-attr]


def test_the_format_of_a_response(api: Any) -> None:
    form = {"type": "json_schema", "name": "x", "schema": SCHEMA, "description": None, "strict": True}
    found = response(say(api, "{}"), text={"format": form}, chat_template_kwargs={})
    assert found["text"]["format"] == form
    assert json.dumps(SCHEMA)[1:-1] in api.params.grammar.source
    assert api.params.grammar.field == "text.format", "with which the engine's errors begin"
    assert response(say(api, "{}"), text={"format": {"type": "json_object"}})["text"] == {
        "format": {"type": "json_object"}
    }
    assert response(say(api, "x"), text={"format": {"type": "text"}})["text"] == {"format": {"type": "text"}}
    assert api.params.grammar is None


@pytest.mark.parametrize(
    ("fields", "param", "begin"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools", "tools[0].type = 'web_search' is not supported"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools", "tools[0].name = 'a b'"),
        ({"tools": [{**FUNCTION, "extra": 1}]}, "tools", "tools[0].extra = 1"),
        (
            {"tools": [FUNCTION], "tool_choice": {"type": "mcp"}},
            "tool_choice",
            f"tool_choice = {{'type': 'mcp'}} is not supported: {CHOICES}",
        ),
        (
            {"tools": [FUNCTION], "tool_choice": "x"},
            "tool_choice",
            f"tool_choice = 'x' is not supported: {CHOICES}",
        ),
        (
            {"tool_choice": {"type": "function", "name": "f"}},
            "tool_choice",
            "tool_choice = {'type': 'function', 'name': 'f'}: expected tools",
        ),
        ({"tool_choice": "required"}, "tool_choice", "tool_choice = 'required': expected tools"),
        (
            {"text": {"format": {"type": "json_schema", "name": "a b", "schema": {}}}},
            "text",
            "text.format.name = 'a b'",
        ),
        ({"text": {"format": {"type": "grammar"}}}, "text", "text.format.type"),
        (
            {"text": {"format": {**FORM, "schema": {"colour": 1}}}, "tools": [FUNCTION]},
            "text.format",
            "text.format (json_schema) is refused: unknown keyword 'colour'",
        ),
        (
            {"text": {"format": FORM}, "tools": [FUNCTION], "tool_choice": "required"},
            "text.format",
            "text.format and tool_choice both say",
        ),
        (
            {"text": {"format": FORM}, "structured_outputs": {"regex": "a"}},
            "structured_outputs",
            "structured_outputs and text.format both ask",
        ),
        ({"input": [{"type": "function_call", "call_id": "a"}]}, "input", "input[0].name = None"),
        (
            {"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "{"}]},
            "input",
            "input[0].arguments = '{'",
        ),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input", "input[0].call_id = None"),
        ({"input": [{"type": "function_call_output", "call_id": "a"}]}, "input", "input[0].output = None"),
        ({"input": [{"type": "computer_call"}]}, "input", "input[0].type = 'computer_call' is not supported"),
    ],
)
def test_what_responses_refuse(api: Any, fields: dict[str, Any], param: str, begin: str) -> None:
    status, error = refused(api, RESPONSES, {"model": "first", "input": "Hello", **fields})
    assert status == 400
    assert error["message"].startswith(begin), error
    assert error["param"] == param


@pytest.mark.parametrize("at_once", [1, 4, 1000])
def test_a_message_has_blocks_for_calls(api: Any, at_once: int) -> None:
    found = message(say(api, f"Look. {CALL}{CALL} done", at_once=at_once), tools=[TOOL])
    use = ToolUse(id="", name="get_weather", input=json.loads(ARGUMENTS))
    assert found.content == [
        Text(text="Look. ", citations=None),
        use,
        use,
        Text(text=" done", citations=None),
    ]
    assert found.stop_reason == "tool_use"


@pytest.mark.parametrize(
    ("choice", "is_constrained"),
    [
        ({"type": "auto"}, False),
        ({"type": "auto", "disable_parallel_tool_use": True}, False),
        ({"type": "any"}, True),
        ({"type": "tool", "name": "get_weather"}, True),
    ],
)
def test_the_choice_of_a_message(api: Any, choice: dict[str, Any], is_constrained: bool) -> None:
    found = message(say(api, CALL), tools=[TOOL], tool_choice=choice)
    assert [type(block) for block in found.content] == [ToolUse]
    assert (api.params.grammar is not None) is is_constrained
    found = message(say(api, CALL), tools=[TOOL], tool_choice={"type": "none"})
    assert found.content == [Text(text=CALL, citations=None)]


def test_a_message_does_not_end_with_a_call_that_a_stop_string_cuts_off(api: Any) -> None:
    fields = {"tools": [TOOL], "tool_choice": {"type": "any"}, "stop_sequences": ["#"]}
    sent = {"max_tokens": 500, "messages": [{"role": "user", "content": "Hello"}], **fields}
    cut = whole_message(say(api, CALL[:65], stop="#"), **sent)
    (use,) = cut.content
    assert isinstance(use, ToolUse)
    assert (use.name, use.input) == ("get_weather", {})
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", "#")
    _, _, raw = post(api, MESSAGES, {"model": "first", "stream": True, **sent})
    *_, delta, _ = message_events(raw.decode())
    assert isinstance(delta, Delta)
    assert delta.delta == Ending(stop_reason="stop_sequence", stop_sequence="#")
    # As an id of `stop_token_ids` ends it.
    cut = whole_message(say(api, CALL[:65]), **sent)
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", None)
    found = message(say(api, CALL, stop="#"), **fields)
    assert (found.stop_reason, found.stop_sequence) == ("tool_use", None)


def test_text_alone_is_one_block(api: Any) -> None:
    assert message(say(api, "Hello"), tools=[TOOL]).content == [Text(text="Hello", citations=None)]
    assert message(say(api, "")).content == [Text(text="", citations=None)]


def test_results_of_calls_are_blocks_of_the_user(api: Any) -> None:
    messages = [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "Look."},
                {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"city": "Rome"}},
                {"type": "tool_use", "id": "t2", "name": "get_weather", "input": {"city": "Oslo"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "rain"},
                {
                    "type": "tool_result",
                    "tool_use_id": "t2",
                    "content": [{"type": "text", "text": "no"}],
                    "is_error": True,
                },
                {"type": "text", "text": "And?"},
            ],
        },
    ]
    message(say(api, "So."), tools=[TOOL], messages=messages)
    prompt = api.prompts[-1]
    first, second = (
        f'<tool_call>{{"name": "get_weather", "arguments": {{"city": "{city}"}}}}#{number}</tool_call>'
        for city, number in (("Rome", "t1"), ("Oslo", "t2"))
    )
    expected = ["assistant\nLook." + first + second, "tool\nrain#t1", "tool\nError: no#t2", "user\nAnd?"]
    places = [prompt.index(f"<|im_start|>{each}<|im_end|>") for each in expected]
    assert places == sorted(places)
    _, _, raw = post(api, COUNT, {"model": "first", "messages": messages, "tools": [TOOL]})
    assert json.loads(raw) == {"input_tokens": len(api.asked[-1].request.rows[0].prompt_token_ids)}


@pytest.mark.parametrize(
    ("fields", "begin"),
    [
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type = 'bash_20250124'"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema = None"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name = 'a b'"),
        (
            {"tools": [{"name": "f", "input_schema": {"type": "array"}}]},
            "tools[0].input_schema.type = 'array'",
        ),
        ({"tools": [{**TOOL, "extra": 1}]}, "tools[0].extra = 1"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice = {'type': 'tool'}"),
        ({"tools": [TOOL], "tool_choice": {"type": "any", "name": "f"}}, "tool_choice = {'type': 'any'"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice names 'g'"),
        ({"tool_choice": {"type": "any"}}, "tool_choice = {'type': 'any'}: expected tools with it."),
    ],
)
def test_what_messages_refuse(api: Any, fields: dict[str, Any], begin: str) -> None:
    body = {"model": "first", "max_tokens": 5, "messages": [{"role": "user", "content": "Hello"}], **fields}
    status, _, raw = post(api, MESSAGES, body)
    assert status == 400
    assert json.loads(raw)["error"]["message"].startswith(begin), raw


USE = {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {}}
NO_TEXT = "has no text: expected text, which the answer continues, or a message of the user after it."
HAS_USE = "holds tool_use: expected a message of the user with its tool_result after it."


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", NO_TEXT),
        (" \n", NO_TEXT),
        ([], NO_TEXT),
        ([{"type": "text", "text": ""}], NO_TEXT),
        ([USE], HAS_USE),
        ([{"type": "text", "text": "Look."}, USE], HAS_USE),
    ],
)
def test_a_last_message_of_the_assistant_that_can_not_be_continued(
    api: Any, content: Any, problem: str
) -> None:
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": content}]
    for path, fields in ((MESSAGES, {"max_tokens": 5}), (COUNT, {})):
        status, _, raw = post(api, path, {"model": "first", "messages": messages, "tools": [TOOL], **fields})
        assert status == 400
        expected = f"messages[1] is the last message, of the assistant, and {problem}"
        assert json.loads(raw)["error"]["message"] == expected


def test_a_last_message_of_the_assistant_is_continued(api: Any) -> None:
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "It is"}]
    message(say(api, " so."), messages=messages)
    assert api.prompts[-1].endswith("assistant\nIt is")


def test_a_last_message_that_the_template_changes_can_not_be_continued(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "It is"}]
    body = {"model": "first", "max_tokens": 5, "messages": messages}
    with scripted_model(
        tmp_path, TOOL_TEMPLATE.replace("message.content", "message.content | upper")
    ) as script:
        status, _, raw = post(script, MESSAGES, body)
    assert status == 400
    expected = "messages: the answer can not continue the content of the last message, as the chat template"
    assert json.loads(raw)["error"]["message"].startswith(expected)
