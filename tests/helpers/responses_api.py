"""Calls of the Responses API whose answers and events are checked strictly by the official client's types."""

from __future__ import annotations

import json
import re
from typing import Any

from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from helpers.openai_api import MODEL, post
from helpers.server import Server

RESPONSES = "/v1/responses"

_WHOLE: TypeAdapter[Any] = TypeAdapter(Response)
_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
# The order of a stream's events; each item has one part.
_ITEM = (
    r"response\.output_item\.added response\.content_part\.added "
    r"(response\.{0}\.delta )*response\.{0}\.done response\.content_part\.done response\.output_item\.done "
)
_CALL = (
    r"response\.output_item\.added (response\.function_call_arguments\.delta )*"
    r"response\.function_call_arguments\.done response\.output_item\.done "
)
_ORDER = re.compile(
    r"response\.created response\.in_progress "
    rf"({_ITEM.format('reasoning_text')})?(({_ITEM.format('output_text')})?({_CALL})*)*"
    r"(response\.completed|response\.incomplete) "
)


def whole_response(server: Server, **fields: Any) -> dict[str, Any]:
    """Ask for a response in one piece."""
    status, _, raw = post(server, RESPONSES, {"model": MODEL, **fields})
    assert status == 200, raw
    _WHOLE.validate_json(raw, strict=True)
    answer: dict[str, Any] = json.loads(raw)
    return answer


def events_of(raw: str) -> list[dict[str, Any]]:
    """The events of a stream, each of which says its name twice and has the next number."""
    *blocks, rest = raw.split("\n\n")
    assert rest == ""
    events = []
    for number, block in enumerate(blocks):
        name, data = block.split("\n")
        _EVENT.validate_json(data.removeprefix("data: "), strict=True)
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        events.append(event)
    return events


def streamed_response(server: Server, **fields: Any) -> dict[str, Any]:
    """Ask for a stream; check its order and that its events add up; return the response at its end."""
    status, headers, raw = post(server, RESPONSES, {"model": MODEL, "stream": True, **fields})
    assert status == 200, raw
    assert headers["content-type"].startswith("text/event-stream")
    events = events_of(raw.decode())
    assert _ORDER.fullmatch("".join(f"{event['type']} " for event in events))
    last: dict[str, Any] = events[-1]["response"]
    items = last["output"]
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == items
    for event in events[2:-1]:
        if "item_id" in event:
            assert event["item_id"] == items[event["output_index"]]["id"]
    for index, item in enumerate(items):
        deltas = [event for event in events if "delta" in event and event["output_index"] == index]
        said = "".join(event["delta"] for event in deltas)
        if item["type"] == "function_call":
            assert said == item["arguments"]
            done = [event for event in events if "arguments" in event and event["output_index"] == index]
            assert [(event["name"], event["arguments"]) for event in done] == [(item["name"], said)]
            continue
        (part,) = item["content"]
        assert said == part["text"]
        tokens = [token for event in deltas for token in event.get("logprobs", [])]
        assert tokens == part.get("logprobs", [])
        done = [event for event in events if "text" in event and event["output_index"] == index]
        assert [event["text"] for event in done] == [part["text"]]
    return last


def text_of(response: dict[str, Any], kind: str = "message") -> str:
    """The text of the items of this type."""
    parts = [part for item in response["output"] if item["type"] == kind for part in item["content"]]
    return "".join(part["text"] for part in parts)


def calls_of(response: dict[str, Any]) -> list[tuple[str, str]]:
    """The names and the arguments of the calls."""
    items = [item for item in response["output"] if item["type"] == "function_call"]
    return [(item["name"], item["arguments"]) for item in items]


def comparable(response: dict[str, Any]) -> dict[str, Any]:
    """A response without what differs each time."""
    own = ("id", "created_at", "completed_at", "usage")
    made = {name: value for name, value in response.items() if name not in own}
    made["output"] = [
        {key: value for key, value in item.items() if key != "call_id"} | {"id": item["id"].partition("_")[0]}
        for item in response["output"]
    ]
    usage = response["usage"]
    return made | {"usage": [usage["input_tokens"], usage["output_tokens"], usage["output_tokens_details"]]}
