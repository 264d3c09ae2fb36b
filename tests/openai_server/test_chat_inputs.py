"""What the Responses API and Anthropic's Messages API send becomes the messages of a chat, or is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from naiad.openai_server.api.anthropic import blocks
from naiad.openai_server.api.anthropic.body import MessageBody
from naiad.openai_server.api.anthropic.errors import body_of, status_of
from naiad.openai_server.api.bodies import parse_body
from naiad.openai_server.api.errors import APIError
from naiad.openai_server.api.messages import plain_messages
from naiad.openai_server.api.responses import items
from naiad.openai_server.api.responses.body import ResponseBody

USER = {"role": "user", "content": "Hello"}
ASSISTANT = {"role": "assistant", "content": "Hi"}


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **more}


@pytest.mark.parametrize(
    ("sent", "messages"),
    [
        ("Hello", [USER]),
        ([USER], [USER]),
        ([{"type": "message", **USER, "id": None, "status": "completed"}], [USER]),
        (
            [{**USER, "content": [{"type": "input_text", "text": "Hel"}, {"type": "text", "text": "lo"}]}],
            [USER],
        ),
        (
            [{"role": "assistant", "content": [{"type": "refusal", "refusal": "No"}]}, USER],
            [{"role": "assistant", "content": "No"}, USER],
        ),
        ([{"type": "reasoning", "summary": []}, USER], [USER]),
        ([{**USER, "content": []}], [{**USER, "content": ""}]),
    ],
)
def test_items_are_messages(sent: Any, messages: list[dict[str, Any]]) -> None:
    assert items.messages_of(sent, None) == messages
    assert items.messages_of(sent, "Be brief.") == [{"role": "system", "content": "Be brief."}, *messages]


@pytest.mark.parametrize("arguments", [{}, {"arguments": None}, {"arguments": ""}])
def test_a_call_without_arguments_has_none(arguments: dict[str, Any]) -> None:
    call = {"type": "function_call", "call_id": "a", "name": "f", **arguments}
    (_, said) = plain_messages(items.messages_of([USER, call], None))
    function = {"name": "f", "arguments": {}}
    assert said["tool_calls"] == [{"type": "function", "function": function, "id": "a"}]


@pytest.mark.parametrize(
    ("sent", "place"),
    [
        ([], "input has no message"),
        ([USER, {"type": "item_reference", "id": "a"}], "input[1].type = 'item_reference'"),
        ([{"role": "user"}], "input[0].content = None"),
        ([{"role": ["user"], "content": ""}], "input[0].role = ['user']"),
        ([{**USER, "name": "a"}], "input[0].name = 'a'"),
        ([{**USER, "content": [text("a", detail=1)]}], "input[0].content[0].detail = 1"),
        ([{**USER, "content": ["a"]}], "input[0].content[0].type = None"),
        ([{**USER, "content": [{"type": ["text"]}]}], "input[0].content[0].type = ['text']"),
        ([{**USER, "content": [{"type": "input_text", "text": 5}]}], "input[0].content[0].text = 5"),
    ],
)
def test_items_that_are_refused(sent: Any, place: str) -> None:
    with pytest.raises(APIError) as refused:
        items.messages_of(sent, "Be brief.")
    assert refused.value.message.startswith(place)
    assert (refused.value.status, refused.value.param) == (400, "input")


@pytest.mark.parametrize(
    ("sent", "messages"),
    [
        ([USER], [USER]),
        ([{**USER, "content": [text("Hel"), text("lo", cache_control={"type": "ephemeral"})]}], [USER]),
        ([USER, USER], [{**USER, "content": "Hello\n\nHello"}]),
        (
            [USER, {"role": "assistant", "content": "Hi"}, USER],
            [USER, {"role": "assistant", "content": "Hi"}, USER],
        ),
    ],
)
def test_blocks_are_messages(sent: Any, messages: list[dict[str, Any]]) -> None:
    before = json.dumps(sent)
    assert blocks.messages_of(sent, None) == messages
    for system in ("Be brief.", [text("Be "), text("brief.")]):
        assert blocks.messages_of(sent, system) == [{"role": "system", "content": "Be brief."}, *messages]
    assert json.dumps(sent) == before


def test_very_many_messages_of_one_role_are_joined_at_once() -> None:
    """To join each with all before it would copy tens of gigabytes."""
    num = 100_000
    (turn,) = blocks.messages_of([USER] * num, None)
    assert turn == {**USER, "content": "\n\n".join(["Hello"] * num)}
    use = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
    (turn,) = blocks.messages_of([{"role": "assistant", "content": [use]}] * num, None)
    assert (turn["content"], len(turn["tool_calls"])) == ("", num)


@pytest.mark.parametrize(
    ("sent", "system", "place"),
    [
        ([], None, "messages is empty"),
        ([USER], [{"type": "image"}], "system[0].type = 'image'"),
        ([USER], [text("a", id=5)], "system[0].id = 5"),
        ([{"role": "user", "content": None}], None, "messages[0].content = None"),
        ([{"role": "user", "content": ["a"]}], None, "messages[0].content[0].type = None"),
        (
            [{**ASSISTANT, "content": [{"type": "tool_result"}]}],
            None,
            "messages[0].content[0].type = 'tool_result'",
        ),
        ([{**USER, "content": [{"type": "text"}]}], None, "messages[0].content[0].text = None"),
        ([{**USER, "id": 5}], None, "messages[0].id = 5"),
        ([USER, {"role": "developer", "content": ""}], None, "messages[1].role = 'developer'"),
    ],
)
def test_blocks_that_are_refused(sent: Any, system: Any, place: str) -> None:
    with pytest.raises(APIError) as refused:
        blocks.messages_of(sent, system)
    assert refused.value.message.startswith(place)
    assert refused.value.param == place.partition("[")[0].partition(" ")[0]


@pytest.mark.parametrize(
    ("kind", "needed", "accepted", "refused"),
    [
        (ResponseBody, {"input": "a"}, {"store": True, "truncation": "disabled"}, {"truncation": "auto"}),
        (ResponseBody, {"input": "a"}, {"max_tool_calls": 5}, {"max_tokens": 5}),
        (
            MessageBody,
            {"messages": [], "max_tokens": 5},
            {"thinking": {"type": "disabled"}, "cache_control": {"type": "ephemeral"}},
            {"thinking": {"type": "adaptive"}},
        ),
        (MessageBody, {"messages": [], "max_tokens": 5}, {"service_tier": "auto"}, {"store": False}),
    ],
)
def test_each_body_has_lists_of_its_own(kind: Any, needed: Any, accepted: Any, refused: Any) -> None:
    body = {"model": "m", **needed}
    assert parse_body(json.dumps(body | accepted).encode(), kind, is_lenient=False)[1] == []
    with pytest.raises(APIError) as error:
        parse_body(json.dumps(body | refused).encode(), kind, is_lenient=False)
    assert error.value.param in refused


@pytest.mark.parametrize(
    ("status", "sent", "kind"),
    [
        (400, 400, "invalid_request_error"),
        (401, 401, "authentication_error"),
        (403, 403, "permission_error"),
        (404, 404, "not_found_error"),
        (405, 405, "invalid_request_error"),
        (413, 413, "request_too_large"),
        (429, 429, "rate_limit_error"),
        (500, 500, "api_error"),
        (503, 529, "overloaded_error"),
    ],
)
def test_errors_in_the_words_of_anthropic(status: int, sent: int, kind: str) -> None:
    error = APIError(status, "why")
    assert (status_of(error), body_of(error, "req_1").error.type) == (sent, kind)
