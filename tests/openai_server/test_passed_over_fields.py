from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest

from helpers.sent_body import SentBody
from naiad.openai_server.api.anthropic.body import MessageBody
from naiad.openai_server.api.bodies import ChatBody, DetokenizeBody, parse_body
from naiad.openai_server.api.responses.body import ResponseBody
from naiad.openai_server.body_reader import BodyReader


def test_clients_cannot_make_the_server_remember_any_number_of_names() -> None:
    reader = BodyReader(ThreadPoolExecutor(1), is_lenient=True)
    names = [f"field{number}" for number in range(1000)] + ["x" * 10_000]
    request: Any = SentBody({"tokens": [1], **dict.fromkeys(names, 1)})
    for _ in range(2):
        assert asyncio.run(reader.read(request, DetokenizeBody)).tokens == [1]
    assert reader.passed_over["field0"] == 2
    assert len(reader.passed_over) == 101
    assert sum(reader.passed_over.values()) == 2 * len(names)
    assert max(map(len, reader.passed_over)) <= 80


@pytest.mark.parametrize(
    ("kind", "field", "place"),
    [
        (ChatBody, "response_format", ("json_schema", "schema")),
        (ChatBody, "structured_outputs", ("json",)),
        (ChatBody, "tools", (0, "function", "parameters")),
        (ResponseBody, "text", ("format", "schema")),
        (ResponseBody, "tools", (0, "parameters")),
        (MessageBody, "tools", (0, "input_schema")),
    ],
)
def test_unknown_keywords_of_schemas_are_passed_over(
    kind: type[Any], field: str, place: tuple[str | int, ...]
) -> None:
    schema: Any = {"type": "object", "requierd": ["a"], "properties": {"requierd": {"order": 1}}}
    sent = schema
    for key in reversed(place):
        sent = [sent] if key == 0 else {key: sent}
    if field == "text":
        sent["format"] |= {"type": "json_schema", "name": "n"}
    extra = {ChatBody: {"messages": []}, ResponseBody: {"input": "a"}}
    body = {"model": "m", field: sent} | extra.get(kind, {"messages": [], "max_tokens": 1})
    read, passed_over = parse_body(msgspec.json.encode(body), kind, is_lenient=True)
    assert sorted(passed_over) == [f"{field}.order", f"{field}.requierd"]
    found = msgspec.to_builtins(getattr(read, field))
    for key in place:
        found = found[key]
    assert found == {"type": "object", "properties": {"requierd": {}}}
    read, passed_over = parse_body(msgspec.json.encode(body), kind, is_lenient=False)
    assert passed_over == []
    assert b'requierd":[' in msgspec.json.encode(getattr(read, field))
