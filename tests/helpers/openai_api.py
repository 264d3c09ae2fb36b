"""Calls of the OpenAI API whose answers are checked strictly by the official client's types."""

from __future__ import annotations

import http.client
import json
from dataclasses import dataclass, field
from typing import Any

from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import TypeAdapter

from helpers.server import Server

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MODEL = "first"

_WHOLE: dict[str, TypeAdapter[Any]] = {
    CHAT: TypeAdapter(ChatCompletion),
    COMPLETIONS: TypeAdapter(Completion),
}
_CHUNK: dict[str, TypeAdapter[Any]] = {
    CHAT: TypeAdapter(ChatCompletionChunk),
    # The official client has one type for both.
    COMPLETIONS: TypeAdapter(Completion),
}


@dataclass
class Said:
    """What the choices of an answer say, streamed or not.

    Attributes:
        texts, reasons, stop_reasons, token_ids, log_probs: one for each choice.
        usage: numbers of tokens.
        reasonings: one for each choice; "" if the model does not reason.
        calls: for each choice the calls of tools: id, name and arguments.
    """

    texts: list[str]
    reasons: list[str | None]
    stop_reasons: list[Any]
    token_ids: list[list[int]]
    log_probs: list[list[float]]
    usage: dict[str, Any]
    reasonings: list[str] = field(default_factory=list)
    calls: list[list[list[str]]] = field(default_factory=list)


def connect(server: Server, timeout_s: float = 60) -> http.client.HTTPConnection:
    """A connection to the API."""
    return http.client.HTTPConnection(address(server), timeout=timeout_s)


def address(server: Server) -> str:
    """HOST:PORT of the API."""
    return server.openai.removeprefix("http://").removesuffix("/v1")


def post(
    server: Server, path: str, body: Any, method: str = "POST", **headers: str
) -> tuple[int, dict[str, str], bytes]:
    """Send a request; return status, headers and body."""
    connection = connect(server)
    raw = body if isinstance(body, bytes) else json.dumps(body)
    sent = {
        "Content-Type": "application/json",
        **{name.replace("_", "-"): text for name, text in headers.items()},
    }
    connection.request(method, path, raw, sent)
    answer = connection.getresponse()
    read = answer.read()
    connection.close()
    return answer.status, {name.lower(): value for name, value in answer.getheaders()}, read


def refused(server: Server, path: str, body: Any, **headers: str) -> tuple[int, dict[str, Any]]:
    """Send a request that must be refused; return the status and the object `error`."""
    status, _, raw = post(server, path, body, **headers)
    error = json.loads(raw)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return status, error


def whole(server: Server, path: str, **fields: Any) -> Said:
    """Ask for an answer in one piece."""
    sent = {"model": MODEL, "return_token_ids": True, **fields}
    status, _, raw = post(server, path, sent)
    assert status == 200, raw
    _WHOLE[path].validate_json(_typed(path, raw, is_chunk=False), strict=True)
    answer = json.loads(raw)
    choices = answer["choices"]
    assert [choice["index"] for choice in choices] == list(range(len(choices)))
    return Said(
        [choice["message"]["content"] or "" if path == CHAT else choice["text"] for choice in choices],
        [choice["finish_reason"] for choice in choices],
        [choice["stop_reason"] for choice in choices],
        [choice["token_ids"] if sent["return_token_ids"] else [] for choice in choices],
        [_values(choice["logprobs"]) for choice in choices],
        answer["usage"],
        [choice.get("message", {}).get("reasoning", "") for choice in choices],
        [_calls(choice["message"]) if path == CHAT else [] for choice in choices],
    )


def streamed(server: Server, path: str, **fields: Any) -> Said:
    """Ask for a stream, and check the rules that clients depend on."""
    sent = {"model": MODEL, "return_token_ids": True, "stream": True, **fields}
    status, headers, raw = post(server, path, sent | {"stream_options": {"include_usage": True}})
    assert status == 200, raw
    assert headers["content-type"].startswith("text/event-stream")
    *events, done, rest = raw.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return _joined(path, [event.removeprefix("data: ") for event in events])


def _typed(path: str, raw: str | bytes, *, is_chunk: bool) -> str | bytes:
    """The JSON with values instead of the nulls that OpenAI sends although the official type has none.

    They are a chunk's reason, and what the logprobs of an echo say of its first token.
    """
    if path == CHAT:
        return raw
    answer = json.loads(raw)
    for choice in answer["choices"]:
        if is_chunk and choice["finish_reason"] is None:
            choice["finish_reason"] = "stop"
        log_probs = choice["logprobs"]
        if log_probs is not None and log_probs["token_logprobs"][:1] == [None]:
            log_probs["token_logprobs"][0] = 0.0
            log_probs["top_logprobs"][:1] = [{}]
    return json.dumps(answer)


def _joined(path: str, events: list[str]) -> Said:
    for event in events:
        _CHUNK[path].validate_json(_typed(path, event, is_chunk=True), strict=True)
    *chunks, last = [json.loads(event) for event in events]
    assert last["choices"] == []
    said = Said([], [], [], [], [], last["usage"])
    for chunk in chunks:
        assert chunk["usage"] is None
        for choice in chunk["choices"]:
            _add(said, path, choice)
    assert None not in said.reasons
    return said


def _add(said: Said, path: str, choice: dict[str, Any]) -> None:
    index = choice["index"]
    while len(said.texts) <= index:
        said.texts.append("")
        said.reasonings.append("")
        said.calls.append([])
        said.reasons.append(None)
        said.stop_reasons.append(None)
        said.token_ids.append([])
        said.log_probs.append([])
    assert said.reasons[index] is None, "a chunk after the last one of its choice"
    delta = choice["delta"] if path == CHAT else {"content": choice["text"]}
    text, reasoning = delta.get("content", ""), delta.get("reasoning", "")
    assert not (reasoning and said.texts[index]), "reasoning after the content"
    said.reasonings[index] += reasoning
    if choice["finish_reason"] is not None:
        assert not text + reasoning, "the reason does not come alone"
        assert "tool_calls" not in delta, "the reason does not come alone"
        said.reasons[index] = choice["finish_reason"]
        said.stop_reasons[index] = choice["stop_reason"]
    said.texts[index] += text
    for call in delta.get("tool_calls", []):
        _add_call(said.calls[index], call)
    said.token_ids[index] += choice.get("token_ids", [])
    said.log_probs[index] += _values(choice["logprobs"])


def _calls(message: dict[str, Any]) -> list[list[str]]:
    """The calls of a message that is not streamed."""
    calls = message.get("tool_calls", [])
    assert calls or message.get("content") is not None, "neither content nor calls"
    assert "tool_calls" not in message or calls, "an empty list"
    return [[call["id"], call["function"]["name"], call["function"]["arguments"]] for call in calls]


def _add_call(calls: list[list[str]], call: dict[str, Any]) -> None:
    """Id, type and name come once, before fragments of the arguments."""
    if call["index"] == len(calls):
        assert call["type"] == "function"
        calls.append([call["id"], call["function"]["name"], ""])
    else:
        assert call["index"] == len(calls) - 1
        assert set(call) == {"index", "function"}
        assert set(call["function"]) == {"arguments"}
    calls[-1][2] += call["function"]["arguments"]


def _values(log_probs: dict[str, Any] | None) -> list[float]:
    if log_probs is None:
        return []
    if "content" in log_probs:
        return [each["logprob"] for each in log_probs["content"]]
    return [value for value in log_probs["token_logprobs"] if value is not None]
