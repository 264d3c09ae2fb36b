"""Calls of tools and formats on a real server with the default model, whose chat template is given tools."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from helpers.messages_api import ToolUse, streamed_message, whole_message
from helpers.openai_api import CHAT, COMPLETIONS, post, refused, streamed, whole
from helpers.remote_door import running_door
from helpers.responses_api import calls_of, comparable, streamed_response, whole_response
from helpers.server import Leaving, Server, eventually, running
from helpers.tiny_repository import create_repository
from helpers.tool_checkpoint import tool_checkpoint

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "days": {"$ref": "#/$defs/days"}},
    "required": ["city", "days"],
    "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
}
FUNCTION = {"name": "get_weather", "description": "Says the weather.", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": FUNCTION}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
QUESTION = [{"role": "user", "content": "What is the weather in Oslo in the next three days?"}]


@pytest.fixture(scope="module")
def tools_dir(default_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tool_checkpoint(tmp_path_factory.mktemp("models") / "first", default_model_dir)


@pytest.fixture(scope="module")
def api(tools_dir: Path, tmp_path_factory: pytest.TempPathFactory, leaving: Leaving) -> Iterator[Server]:
    repository = tmp_path_factory.mktemp("tools") / "repository"
    create_repository(repository, tools_dir)
    with running(leaving, repository, "--openai-port", "0") as server:
        yield server


def both(api: Server, **fields: Any) -> Any:
    """The answer, which is the same streamed and not, but for the ids of calls."""
    sent = {"messages": QUESTION, "max_tokens": 200, "seed": 5, **fields}
    found, other = whole(api, CHAT, **sent), streamed(api, CHAT, **sent)
    for said in (found, other):
        said.usage = {}
        for calls in said.calls:
            assert all(call.pop(0) for call in calls)
    assert found == other
    return found


@pytest.mark.parametrize("temperature", [0, 1])
def test_required_calls_have_valid_arguments(api: Server, temperature: float) -> None:
    single = {"tool_choice": "required", "parallel_tool_calls": False}
    said = both(api, tools=TOOLS, n=1 if temperature == 0 else 3, temperature=temperature, **single)
    assert set(said.reasons) == {"tool_calls"}
    assert set(said.texts) == {""}
    for calls in said.calls:
        ((name, arguments),) = calls
        assert name == "get_weather"
        jsonschema.validate(json.loads(arguments), PARAMETERS)


def test_formats_are_obeyed(api: Server) -> None:
    said = both(api, response_format=FORMAT, n=3, logprobs=True)
    assert set(said.reasons) == {"stop"}
    for text in said.texts:
        jsonschema.validate(json.loads(text), SCHEMA)
    assert [len(each) for each in said.log_probs] == [len(each) for each in said.token_ids]
    said = whole(
        api, COMPLETIONS, prompt=["Pick:", "Choose:"], structured_outputs={"choice": ["red", "blue"]}
    )
    assert set(said.texts) <= {"red", "blue"}


def test_other_apis_call_tools(api: Server) -> None:
    tool = {"type": "function", **FUNCTION, "strict": True}
    sent = {"input": QUESTION, "max_output_tokens": 200, "seed": 5}
    sent |= {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    found = whole_response(api, **sent)
    assert comparable(streamed_response(api, **sent)) == comparable(found)
    ((name, arguments),) = calls_of(found)
    assert name == "get_weather"
    jsonschema.validate(json.loads(arguments), PARAMETERS)

    anthropics = {"name": "get_weather", "input_schema": PARAMETERS}
    choice = {"type": "tool", "name": "get_weather"}
    asked = {"messages": QUESTION, "max_tokens": 200, "seed": 5, "tools": [anthropics], "tool_choice": choice}
    for message in (whole_message(api, **asked), streamed_message(api, **asked)):
        (block,) = message.content
        assert isinstance(block, ToolUse)
        assert message.stop_reason == "tool_use"
        jsonschema.validate(block.input, PARAMETERS)


def test_a_conversation_with_the_official_client(api: Server) -> None:
    client = openai.OpenAI(base_url=api.openai, api_key="none", max_retries=0)
    sent: dict[str, Any] = {"model": "first", "max_tokens": 60, "seed": 5, "tools": TOOLS}
    first = client.chat.completions.create(
        messages=QUESTION,  # type: ignore[arg-type]
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
        **sent,
    )
    message = first.choices[0].message
    assert message.tool_calls is not None
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"}
    second = client.chat.completions.create(
        messages=[*QUESTION, message.model_dump(exclude_none=True), result], tool_choice="none", **sent
    )
    assert second.choices[0].message.content


def test_a_grammar_that_can_not_be_compiled_is_refused(api: Server) -> None:
    body = {"model": "first", "messages": QUESTION, "structured_outputs": {"regex": "("}}
    for stream in (False, True):
        status, error = refused(api, CHAT, {**body, "stream": stream})
        assert status == 400
        assert "structured_outputs.regex" in error["message"]
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"colour": 1}}}
    status, error = refused(api, CHAT, {"model": "first", "messages": QUESTION, "response_format": form})
    assert status == 400
    assert "response_format" in error["message"]
    assert "colour" in error["message"]


def test_in_front_of_a_remote_server(api: Server, tools_dir: Path) -> None:
    with running_door(api.grpc, tools_dir) as door:
        eventually(lambda: len(json.loads(post(door, "/v1/models", b"", "GET")[2])["data"]) == 2)
        for model in ("ensemble", "text"):
            sent = {
                "messages": QUESTION,
                "max_tokens": 200,
                "seed": 5,
                "model": model,
                "return_token_ids": False,
            }
            expected = whole(api, CHAT, **{**sent, "model": "first"}, response_format=FORMAT)
            found = whole(door, CHAT, **sent, response_format=FORMAT)
            assert found.texts == expected.texts
            body = {"model": model, "messages": QUESTION, "tools": TOOLS, "tool_choice": "required"}
            status, error = refused(door, CHAT, body)
            assert (status, error["param"]) == (400, "tools")
            assert whole(door, CHAT, **sent, tools=TOOLS).reasons
