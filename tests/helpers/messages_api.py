"""Calls of Anthropic's Messages API whose answers and events are checked by types written for them."""

from __future__ import annotations

import json
from typing import Any, Literal

import msgspec

from helpers.openai_api import MODEL, post
from helpers.server import Server

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"


class _Strict(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    pass


class OutputTokens(_Strict):
    thinking_tokens: int


class Usage(_Strict):
    input_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int
    output_tokens: int
    output_tokens_details: OutputTokens


class Text(_Strict):
    type: Literal["text"]
    text: str
    citations: None


class Message(_Strict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Text]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence"] | None
    stop_sequence: str | None
    usage: Usage


class Start(_Strict, tag="message_start"):
    message: Message


class BlockStart(_Strict, tag="content_block_start"):
    index: Literal[0]
    content_block: Text


class Ping(_Strict, tag="ping"):
    pass


class TextDelta(_Strict):
    type: Literal["text_delta"]
    text: str


class BlockDelta(_Strict, tag="content_block_delta"):
    index: Literal[0]
    delta: TextDelta


class BlockStop(_Strict, tag="content_block_stop"):
    index: Literal[0]


class Ending(_Strict):
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence"]
    stop_sequence: str | None


class Delta(_Strict, tag="message_delta"):
    delta: Ending
    usage: Usage


class Stop(_Strict, tag="message_stop"):
    pass


class ErrorDetails(_Strict):
    type: str
    message: str


class Error(_Strict, tag="error"):
    error: ErrorDetails
    request_id: str | None


Event = Start | BlockStart | Ping | BlockDelta | BlockStop | Delta | Stop | Error


def whole_message(server: Server, **fields: Any) -> Message:
    """Ask for a message in one piece."""
    status, _, raw = post(server, MESSAGES, {"model": MODEL, **fields}, anthropic_version="2023-06-01")
    assert status == 200, raw
    return msgspec.json.decode(raw, type=Message)


def message_events(raw: str) -> list[Event]:
    """The events of a stream, each of which says its name twice."""
    *blocks, rest = raw.split("\n\n")
    assert rest == ""
    events = []
    for block in blocks:
        name, data = block.split("\n")
        data = data.removeprefix("data: ")
        assert name == f"event: {json.loads(data)['type']}"
        events.append(msgspec.json.decode(data, type=Event))
    return events


def streamed_message(server: Server, **fields: Any) -> Message:
    """Ask for a stream; check its order; return the message that its events add up to."""
    status, headers, raw = post(server, MESSAGES, {"model": MODEL, "stream": True, **fields})
    assert status == 200, raw
    assert headers["content-type"].startswith("text/event-stream")
    start, begin, ping, *deltas, stop, delta, end = message_events(raw.decode())
    assert isinstance(start, Start)
    assert isinstance(begin, BlockStart)
    assert isinstance(delta, Delta)
    assert (type(ping), type(stop), type(end)) == (Ping, BlockStop, Stop)
    message = start.message
    assert (message.content, message.stop_reason, begin.content_block.text) == ([], None, "")
    first, last = message.usage, delta.usage
    assert first.input_tokens == last.input_tokens
    assert first.cache_read_input_tokens == last.cache_read_input_tokens
    text = ""
    for each in deltas:
        assert isinstance(each, BlockDelta)
        text += each.delta.text
    return msgspec.structs.replace(
        message,
        content=[Text(type="text", text=text, citations=None)],
        stop_reason=delta.delta.stop_reason,
        stop_sequence=delta.delta.stop_sequence,
        usage=last,
    )


def refused_message(server: Server, body: Any, path: str = MESSAGES, **headers: str) -> tuple[int, Error]:
    """Send a request that must be refused; return the status and the error."""
    status, sent, raw = post(server, path, body, **headers)
    error = msgspec.json.decode(raw, type=Error)
    assert error.request_id == sent["request-id"] == sent["x-request-id"]
    return status, error
