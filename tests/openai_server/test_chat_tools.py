"""Chats with tools and formats, answered by a model that says what it is told to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from helpers.openai_api import CHAT, COMPLETIONS, post, refused, streamed, whole
from helpers.scripted_model import REASONING_TEMPLATE, Scripted, scripted_model
from helpers.tiny_tokenizers import CHAT_TEMPLATE
from naiad.openai_server.api.parsing.families import FamilyChoices
from naiad.openai_server.api.tools import MAX_TOOLS, MAX_TOOLS_BYTES
from naiad.sequence import FinishReason, GrammarKind

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
WEATHER = {"name": "get_weather", "description": "Says the weather.", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": WEATHER}, {"type": "function", "function": {"name": "now"}}]
STRICT = [{"type": "function", "function": {**WEATHER, "strict": True}}]
HELLO = [{"role": "user", "content": "Hello"}]
ARGUMENTS = '{"city": "Paris, é😀", "days": 2}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
NOW = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
NAMED = {"type": "function", "function": {"name": "now"}}


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripted]:
    with scripted_model(tmp_path_factory.mktemp("tools")) as script:
        yield script


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripted]:
    with scripted_model(tmp_path_factory.mktemp("thinker"), REASONING_TEMPLATE) as script:
        yield script


def test_the_list_of_models_says_whether_they_take_tools(api: Scripted, tmp_path: Path) -> None:
    def says(script: Any) -> bool:
        _, _, raw = post(script, "/v1/models", b"", "GET")
        (card,) = json.loads(raw)["data"]
        return bool(card["capabilities"]["tools"])

    assert says(api)
    with scripted_model(tmp_path / "without", CHAT_TEMPLATE) as without_tools:
        assert not says(without_tools)


def say(
    script: Scripted,
    *texts: str,
    reason: FinishReason = FinishReason.STOP,
    stop: str = "",
    at_once: int = 1,
) -> Scripted:
    script.texts, script.reason, script.stop, script.num_at_once = texts, reason, stop, at_once
    return script


def both(script: Any, **fields: Any) -> Any:
    """The answer, which is the same streamed and not, but for the ids of calls."""
    sent = {"messages": HELLO, **fields}
    found, other = whole(script, CHAT, **sent), streamed(script, CHAT, **sent)
    for said in (found, other):
        for calls in said.calls:
            assert len({call.pop(0) for call in calls}) == len(calls)
    assert found == other
    return found


@pytest.mark.parametrize("at_once", [1, 3, 1000])
def test_calls_are_told_from_content(api: Any, at_once: int) -> None:
    said = both(say(api, f"Look.\n{CALL}\n{NOW}", at_once=at_once), tools=TOOLS)
    assert said.texts == ["Look.\n"]
    assert said.calls == [[["get_weather", ARGUMENTS], ["now", "{}"]]]
    assert said.reasons == ["tool_calls"]
    assert api.params.grammar is None


def test_every_choice_has_calls_of_its_own(api: Any) -> None:
    said = both(say(api, CALL, "Hello", NOW), tools=TOOLS, n=3)
    assert said.calls == [[["get_weather", ARGUMENTS]], [], [["now", "{}"]]]
    assert said.texts == ["", "Hello", ""]
    assert said.reasons == ["tool_calls", "stop", "tool_calls"]


def test_a_call_that_is_cut_off_is_content(api: Any) -> None:
    said = both(say(api, CALL[:40], reason=FinishReason.LENGTH), tools=TOOLS)
    assert (said.texts, said.calls, said.reasons) == ([CALL[:40]], [[]], ["length"])


def test_a_broken_call_is_content(api: Any) -> None:
    broken = CALL.replace('"days": 2', '"days": two')
    said = both(say(api, f"{broken} {NOW}"), tools=TOOLS)
    assert (said.texts, said.calls, said.reasons) == ([f"{broken} "], [[["now", "{}"]]], ["tool_calls"])


@pytest.mark.parametrize("fields", [{}, {"tools": []}, {"tools": TOOLS, "tool_choice": "none"}])
def test_without_tools_nothing_is_a_call(api: Any, fields: dict[str, Any]) -> None:
    said = both(say(api, CALL), **fields)
    assert (said.texts, said.calls, said.reasons) == ([CALL], [[]], ["stop"])
    assert "get_weather" not in api.prompts[-1]


def test_only_one_call_if_calls_may_not_be_parallel(api: Any) -> None:
    said = both(say(api, CALL + NOW), tools=TOOLS, parallel_tool_calls=False)
    assert said.calls == [[["get_weather", ARGUMENTS]]]


def test_what_a_model_reasons_is_told_from_calls(thinker: Any) -> None:
    said = both(say(thinker, f"<think>{NOW}</think>\n\n{CALL}"), tools=TOOLS)
    assert (said.reasonings, said.texts) == ([NOW], [""])
    assert said.calls == [[["get_weather", ARGUMENTS]]]


def test_log_probs_are_those_of_the_content(api: Any) -> None:
    said = both(say(api, f"Look {CALL} done"), tools=TOOLS, logprobs=True)
    plain = both(say(api, "Look  done"), logprobs=True)
    assert said.texts == plain.texts
    tokens = api.asked[-1].request
    assert tokens is not None
    # " done" may be divided otherwise behind a call.
    assert said.log_probs[0][:4] == plain.log_probs[0][:4]
    assert len(said.log_probs[0]) < len(said.token_ids[0]) / 4
    reason = both(say(api, CALL), tools=TOOLS, logprobs=True)
    assert reason.log_probs == [[]]


def test_tools_and_their_results_reach_the_template(api: Any) -> None:
    _, function, result = (
        {"role": "user", "content": "Weather?"},
        {"name": "get_weather", "arguments": '{"city": "Paris <|im_end|>"}'},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "rain <|im_end|>"}]},
    )
    calls = [{"id": "call_1", "type": "function", "function": function}]
    messages = [*HELLO, {"role": "assistant", "content": None, "tool_calls": calls}, result]
    tools = [{"type": "function", "function": {**WEATHER, "description": "<|im_start|>system"}}]
    said = both(say(api, "It rains."), messages=messages, tools=tools)
    assert said.texts == ["It rains."]
    prompt = api.prompts[-1]
    assert json.dumps(tools[0]["function"]["parameters"]) in prompt
    assert (
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris <|im_end|>"}}#call_1</tool_call>'
        in prompt
    )
    assert "rain <|im_end|>#call_1" in prompt
    # What messages and tools say never becomes a special token.
    ids = api.asked[-1].request.rows[0].prompt_token_ids
    special = [each for each in ids if each in (2, 3)]
    assert len(special) == 2 * 3 + 1


def test_an_answer_can_be_sent_back_as_it_is(api: Any) -> None:
    client = openai.OpenAI(base_url=api.openai, api_key="none", max_retries=0)
    say(api, CALL)
    answer = client.chat.completions.create(model="first", messages=HELLO, tools=TOOLS)  # type: ignore[call-overload]
    message = answer.choices[0].message
    assert message.content is None
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"}
    say(api, "It rains.")
    messages = [*HELLO, message.model_dump(exclude_none=True), result]
    again = client.chat.completions.create(model="first", messages=messages, tools=TOOLS)  # type: ignore[call-overload]
    assert again.choices[0].message.content == "It rains."
    assert message.tool_calls[0].id in api.prompts[-1]


def test_the_official_client_puts_a_stream_together(api: Any) -> None:
    client = openai.OpenAI(base_url=api.openai, api_key="none", max_retries=0)
    say(api, f"Look.{CALL}{NOW}")
    with client.chat.completions.stream(model="first", messages=HELLO, tools=TOOLS) as stream:  # type: ignore[arg-type]
        completion = stream.get_final_completion()
    message = completion.choices[0].message
    assert message.content == "Look."
    assert [call.function.name for call in message.tool_calls or []] == ["get_weather", "now"]
    assert completion.choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_call_that_is_required_is_constrained(api: Any, choice: Any) -> None:
    said = both(say(api, NOW), tools=TOOLS, tool_choice=choice)
    assert said.calls == [[["now", "{}"]]]
    assert api.params.grammar.kind is GrammarKind.LARK
    names = ["now"] if choice == NAMED else ["get_weather", "now"]
    assert [name for name in ("get_weather", "now") if f'"{name}\\"' in api.params.grammar.source] == names
    assert "get_weather" in api.prompts[-1], "the model sees all tools"


def test_arguments_of_constrained_calls_are_streamed(api: Any) -> None:
    say(api, CALL[:60], reason=FinishReason.LENGTH)
    said = both(api, tools=STRICT)
    assert (said.texts, said.reasons) == ([""], ["length"])
    ((name, arguments),) = said.calls[0]
    assert name == "get_weather"
    assert ARGUMENTS.startswith(arguments)
    sent = {"model": "first", "messages": HELLO, "tools": STRICT, "stream": True}
    _, _, raw = post(say(api, CALL), CHAT, sent)
    fragments = raw.decode().count('"function":{"arguments":')
    assert fragments > 5


@pytest.mark.parametrize("fields", [{"tools": STRICT}, {"tools": TOOLS, "tool_choice": "required"}])
def test_a_call_that_a_stop_string_cuts_off_is_not_finished(api: Any, fields: dict[str, Any]) -> None:
    said = both(say(api, CALL, CALL[:60], CALL + CALL[:60], stop="#"), **fields, n=3)
    assert said.reasons == ["tool_calls", "stop", "stop"]
    assert said.stop_reasons == ["#"] * 3
    assert [len(calls) for calls in said.calls] == [1, 1, 2]
    for calls in said.calls[1:]:
        name, arguments = calls[-1]
        assert name == "get_weather"
        assert arguments
        assert ARGUMENTS.startswith(arguments)
        assert arguments != ARGUMENTS
    # Before its arguments it is content.
    said = both(say(api, CALL + CALL[:20], stop="#"), **fields)
    assert (said.reasons, said.texts) == (["stop"], [CALL[:20]])
    assert said.calls == [[["get_weather", ARGUMENTS]]]


END = "\n</tool_call>"


@pytest.mark.parametrize("size", range(len(END) + 1))
def test_a_call_that_is_cut_off_behind_its_arguments_is_whole(api: Any, size: int) -> None:
    text = CALL.removesuffix(END) + END[:size]
    for fields in ({"tools": TOOLS, "tool_choice": "required"}, {"tools": STRICT}, {"tools": TOOLS}):
        for reason, stop, expected in (
            (FinishReason.LENGTH, "", "length"),
            (FinishReason.STOP, END[size : size + 1] or "#", "tool_calls"),
        ):
            said = both(say(api, text, reason=reason, stop=stop), **fields)
            assert (said.texts, said.reasons) == ([""], [expected])
            assert said.calls == [[["get_weather", ARGUMENTS]]]


def test_strict_tools_constrain_calls_alone(api: Any) -> None:
    said = both(say(api, "Hello"), tools=STRICT)
    assert said.texts == ["Hello"]
    assert api.params.grammar.kind is GrammarKind.LARK
    assert api.params.grammar.field == "tools"


def test_the_grammar_begins_behind_what_is_reasoned(thinker: Any) -> None:
    sent = {"response_format": {"type": "json_object"}, "chat_template_kwargs": {}}
    both(say(thinker, "<think>a</think>{}"), **sent)
    # Whether it reasons is open, so the grammar allows both.
    assert thinker.params.grammar.begins_after == ""
    assert '"<think>"' in thinker.params.grammar.source
    begun = [*HELLO, {"role": "assistant", "content": "<think>so"}]
    fields = {**sent, "messages": begun, "continue_final_message": True}
    both(say(thinker, "on</think>{}"), **fields)
    assert (thinker.params.grammar.kind, thinker.params.grammar.begins_after) == (
        GrammarKind.JSON_OBJECT,
        "</think>",
    )
    both(
        say(thinker, "on</think>{}"),
        **{**fields, "tools": TOOLS, "response_format": None, "tool_choice": NAMED},
    )
    assert thinker.params.grammar.begins_after == "</think>"


FORMATS: list[tuple[dict[str, Any], GrammarKind, str]] = [
    ({"response_format": {"type": "json_object"}}, GrammarKind.JSON_OBJECT, ""),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
            }
        },
        GrammarKind.JSON_SCHEMA,
        json.dumps(SCHEMA),
    ),
    ({"structured_outputs": {"json": SCHEMA}}, GrammarKind.JSON_SCHEMA, ""),
    ({"structured_outputs": {"json_object": True}}, GrammarKind.JSON_OBJECT, ""),
    ({"structured_outputs": {"regex": "a+"}}, GrammarKind.REGEX, "a+"),
    ({"structured_outputs": {"choice": ["a", "b"]}}, GrammarKind.CHOICE, '["a","b"]'),
    ({"structured_outputs": {"grammar": 'root ::= "a"'}}, GrammarKind.EBNF, 'root ::= "a"'),
]


@pytest.mark.parametrize(("fields", "kind", "source"), FORMATS)
def test_formats_become_grammars(api: Any, fields: dict[str, Any], kind: GrammarKind, source: str) -> None:
    both(say(api, "x", "y"), **fields, n=2)
    found = api.params.grammar
    assert (found.kind, found.begins_after, found.field.partition(".")[0]) == (kind, "", next(iter(fields)))
    assert not source or found.source == source
    whole(api, COMPLETIONS, prompt=["a", "b"], **fields)
    assert [row.params.grammar for row in api.asked[-1].request.rows] == [found, found]


def test_text_is_no_format(api: Any) -> None:
    both(say(api, "x"), response_format={"type": "text"})
    assert api.params.grammar is None


def test_a_format_leaves_room_for_calls(api: Any) -> None:
    both(say(api, NOW), tools=TOOLS, response_format=FORMATS[1][0]["response_format"])
    source = api.params.grammar.source
    assert "<tool_call>" in source
    assert json.dumps(SCHEMA)[:-1] in source


def tools(**changes: Any) -> list[Any]:
    return [{"type": "function", "function": {**WEATHER, **changes}}]


ASKED = {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [{"type": "web_search"}]}, "tools", "tools[0].type = 'web_search' is not supported"),
    ({"tools": [{"type": "function"}]}, "tools", "tools[0].function = None"),
    ({"tools": tools(name="a b")}, "tools", "tools[0].function.name = 'a b'"),
    ({"tools": tools(name="x" * 129)}, "tools", "tools[0].function.name"),
    ({"tools": tools(description=5)}, "tools", "tools[0].function.description = 5"),
    ({"tools": tools(parameters=[])}, "tools", "tools[0].function.parameters = []"),
    ({"tools": tools(parameters={"type": "array"})}, "tools", "tools[0].function.parameters.type = 'array'"),
    (
        {"tools": tools(parameters={"properties": []})},
        "tools",
        "tools[0].function.parameters.properties = []",
    ),
    ({"tools": tools(parameters={"required": "a"})}, "tools", "tools[0].function.parameters.required = 'a'"),
    ({"tools": tools(strict="yes")}, "tools", "tools[0].function.strict = 'yes'"),
    ({"tools": tools(extra=1)}, "tools", "tools[0].function.extra = 1 is not supported"),
    ({"tools": TOOLS + TOOLS}, "tools", "tools has 'get_weather' more than once"),
    (
        {"tools": TOOLS[:1] * (MAX_TOOLS + 1)},
        "tools",
        f"tools has {MAX_TOOLS + 1} entries: at most {MAX_TOOLS}",
    ),
    ({"tools": tools(description="x" * MAX_TOOLS_BYTES)}, "tools", "tools has"),
    (
        {"tools": tools(strict=True, parameters={"properties": {"a": {"colour": 1}}})},
        "tools",
        "the parameters of the strict tool get_weather: unknown keyword 'colour'",
    ),
    (
        {
            "tools": tools(parameters={"$ref": "#/$defs/A", "$defs": {"A": {"$ref": "#/$defs/A"}}}),
            "tool_choice": "required",
        },
        "tools",
        "the parameters of the tool get_weather: $ref = '#/$defs/A' leads back to itself for the same value",
    ),
    ({"tool_choice": "required"}, "tool_choice", "tool_choice = 'required': expected tools with it"),
    ({"tools": TOOLS, "tool_choice": "some"}, "tool_choice", "tool_choice = 'some' is not supported"),
    ({"tools": TOOLS, "tool_choice": {"type": "any"}}, "tool_choice", "tool_choice = {'type': 'any'}"),
    (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice",
        "tool_choice names 'g': expected one of tools: get_weather, now",
    ),
    (
        {"response_format": {"type": "xml"}},
        "response_format",
        "response_format.type = 'xml' is not supported",
    ),
    (
        {"response_format": {"type": "structural_tag"}},
        "response_format",
        "response_format.type = 'structural_tag'",
    ),
    ({"response_format": {"type": "json_schema"}}, "response_format", "response_format.json_schema = None"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}},
        "response_format",
        "response_format.json_schema.name = 'a b'",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
        "response_format",
        "response_format.json_schema.schema = None",
    ),
    (
        {"response_format": {"type": "text", "x": 1}},
        "response_format",
        "response_format.x = 1 is not supported",
    ),
    (
        {"structured_outputs": {"whitespace_pattern": " "}},
        "structured_outputs",
        "structured_outputs.whitespace_",
    ),
    (
        {"structured_outputs": {"structural_tag": "{}"}},
        "structured_outputs",
        "structured_outputs.structural_tag",
    ),
    (
        {"structured_outputs": {"json": SCHEMA, "regex": "a"}},
        "structured_outputs",
        "structured_outputs has json and",
    ),
    (
        {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
        "structured_outputs",
        "structured_outputs and response_format both ask",
    ),
    (
        {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}},
        "response_format",
        "response_format and tool_choice both say",
    ),
    (
        {"tools": TOOLS, "structured_outputs": {"regex": "a"}},
        "structured_outputs",
        "structured_outputs.regex (regex) can not be combined with tools",
    ),
    (
        {"messages": [*HELLO, {"role": "assistant", "content": " "}], "continue_final_message": True},
        "messages",
        "messages: the answer can not continue the content of the last message, as it is empty: expected",
    ),
    (
        {
            "continue_final_message": True,
            "messages": [*HELLO, {"role": "assistant", "content": "Look.", "tool_calls": [ASKED]}],
        },
        "messages",
        "messages: the answer can not continue the content of the last message, as tool_calls follow it",
    ),
    ({"guided_json": {}}, "guided_json", "guided_json = {} is not supported"),
]


@pytest.mark.parametrize(("fields", "param", "begin"), REFUSED)
def test_what_is_refused(api: Any, fields: dict[str, Any], param: str, begin: str) -> None:
    status, error = refused(api, CHAT, {"model": "first", "messages": HELLO, **fields})
    assert status == 400
    assert error["message"].startswith(begin), error
    assert error["param"] == param


def assistant(**call: Any) -> dict[str, Any]:
    made = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}, **call}
    return {"role": "assistant", "tool_calls": [made]}


@pytest.mark.parametrize(
    ("message", "begin"),
    [
        (assistant(type="code"), "messages[1].tool_calls[0].type = 'code'"),
        (assistant(function=None), "messages[1].tool_calls[0].function = None"),
        (assistant(id=None), "messages[1].tool_calls[0].id = None"),
        (assistant(extra=1), "messages[1].tool_calls[0].extra = 1"),
        (assistant(function={"name": ""}), "messages[1].tool_calls[0].function.name = ''"),
        (
            assistant(function={"name": "f", "arguments": "{"}),
            "messages[1].tool_calls[0].function.arguments = '{'",
        ),
        (
            assistant(function={"name": "f", "arguments": "[]"}),
            "messages[1].tool_calls[0].function.arguments = '[]'",
        ),
        (
            assistant(function={"name": "f", "arguments": {}}),
            "messages[1].tool_calls[0].function.arguments = {}",
        ),
        ({"role": "assistant", "tool_calls": {"a": 1}}, "messages[1].tool_calls = {'a': 1}"),
        ({"role": "tool", "content": "x"}, "messages[1].tool_call_id = None"),
        ({"role": "tool", "tool_call_id": "a"}, "messages[1].content = None"),
        ({"role": "user", "content": "x", "tool_call_id": "a"}, "messages[1].tool_call_id = 'a'"),
        ({"role": "user", "content": "x", "tool_calls": [1]}, "messages[1].tool_calls = [1]"),
    ],
)
def test_messages_that_are_refused(api: Any, message: dict[str, Any], begin: str) -> None:
    status, error = refused(api, CHAT, {"model": "first", "messages": [*HELLO, message]})
    assert (status, error["param"]) == (400, "messages")
    assert error["message"].startswith(begin), error


@pytest.mark.parametrize("levels", [126, 129, 500, 900, 990])
def test_arguments_that_are_nested_too_deep_are_refused(api: Any, levels: int) -> None:
    arguments = '{"a":' * (levels - 1) + "{}" + "}" * (levels - 1)
    message = assistant(function={"name": "f", "arguments": arguments})
    status, error = refused(api, CHAT, {"model": "first", "messages": [*HELLO, message]})
    assert (status, error["param"]) == (400, "messages")


@pytest.mark.parametrize("levels", [129, 500, 900])
def test_a_schema_that_is_nested_too_deep_is_refused(api: Any, levels: int) -> None:
    deep: dict[str, Any] = {}
    for _ in range(levels - 4):
        deep = {"not": deep}
    sent = {"model": "first", "messages": HELLO, "tools": tools(parameters=deep)}
    status, error = refused(api, CHAT, sent)
    assert (status, error["param"]) == (400, "tools")


def test_a_template_without_tools_says_so(tmp_path: Path) -> None:
    with scripted_model(tmp_path, CHAT_TEMPLATE) as script:
        sent = {"model": "first", "messages": HELLO, "tools": TOOLS}
        status, error = refused(script, CHAT, sent)
        assert (status, error["param"], error["code"]) == (400, "tools", "unsupported_value")
        assert "chat template of this model takes no tools" in error["message"]
        assert whole(script, CHAT, messages=HELLO, tools=TOOLS, tool_choice="none").texts == ["Hello"]
        result = {"role": "tool", "tool_call_id": "a", "content": "x"}
        assert refused(script, CHAT, {"model": "first", "messages": [*HELLO, result]})[0] == 400


def test_a_model_of_no_known_family_can_not_call(tmp_path: Path) -> None:
    with scripted_model(tmp_path, families=FamilyChoices(calls="none")) as script:
        status, error = refused(script, CHAT, {"model": "first", "messages": HELLO, "tools": TOOLS})
        assert (status, error["param"]) == (400, "tools")
        assert "--openai-tool-parser" in error["message"]


def test_tokens_are_counted_with_tools(api: Any) -> None:
    counts = []
    for fields in ({}, {"tools": TOOLS}):
        _, _, raw = post(api, "/tokenize", {"model": "first", "messages": HELLO, **fields})
        counts.append(json.loads(raw)["count"])
    both(say(api, "x"), tools=TOOLS)
    assert counts[0] < counts[1] == len(api.asked[-1].request.rows[0].prompt_token_ids)
