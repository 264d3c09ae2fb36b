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


class Text(_Strict, tag="text", tag_field="type"):
    text: str
    citations: None


class ToolUse(_Strict, tag="tool_use", tag_field="type"):
    id: str
    name: str
    input: dict[str, Any]


class Message(_Strict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Text | ToolUse]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: Usage


class Start(_Strict, tag="message_start"):
    message: Message


class BlockStart(_Strict, tag="content_block_start"):
    index: int
    content_block: Text | ToolUse


class Ping(_Strict, tag="ping"):
    pass


class TextDelta(_Strict, tag="text_delta", tag_field="type"):
    text: str


class InputDelta(_Strict, tag="input_json_delta", tag_field="type"):
    partial_json: str


class BlockDelta(_Strict, tag="content_block_delta"):
    index: int
    delta: TextDelta | InputDelta


class BlockStop(_Strict, tag="content_block_stop"):
    index: int


class Ending(_Strict):
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
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
    start, ping, *inner, delta, end = message_events(raw.decode())
    assert isinstance(start, Start)
    assert isinstance(delta, Delta)
    assert (type(ping), type(end)) == (Ping, Stop)
    message = start.message
    assert (message.content, message.stop_reason) == ([], None)
    first, last = message.usage, delta.usage
    assert first.input_tokens == last.input_tokens
    assert first.cache_read_input_tokens == last.cache_read_input_tokens
    return msgspec.structs.replace(
        message,
        content=_blocks(inner),
        stop_reason=delta.delta.stop_reason,
        stop_sequence=delta.delta.stop_sequence,
        usage=last,
    )


def _blocks(events: list[Event]) -> list[Text | ToolUse]:
    """The blocks that events add up to; each begins, grows and stops before the next one."""
    blocks: list[Text | ToolUse] = []
    grown, is_open = "", False
    for event in events:
        assert isinstance(event, BlockStart | BlockDelta | BlockStop)
        match event:
            case BlockStart(index=index, content_block=block):
                assert (index, is_open) == (len(blocks), False)
                assert not (block.text if isinstance(block, Text) else block.input)
                blocks.append(block)
                grown, is_open = "", True
            case BlockDelta(index=index, delta=delta):
                assert (index, is_open) == (len(blocks) - 1, True)
                assert isinstance(delta, TextDelta) == isinstance(blocks[-1], Text)
                grown += delta.text if isinstance(delta, TextDelta) else delta.partial_json
            case BlockStop(index=index):
                assert (index, is_open) == (len(blocks) - 1, True)
                is_open, last = False, blocks[-1]
                if isinstance(last, Text):
                    blocks[-1] = msgspec.structs.replace(last, text=grown)
                else:
                    blocks[-1] = msgspec.structs.replace(last, input=json.loads(grown))
    assert not is_open
    return blocks


def refused_message(server: Server, body: Any, path: str = MESSAGES, **headers: str) -> tuple[int, Error]:
    """Send a request that must be refused; return the status and the error."""
    status, sent, raw = post(server, path, body, **headers)
    error = msgspec.json.decode(raw, type=Error)
    assert error.request_id == sent["request-id"] == sent["x-request-id"]
    return status, error
