"""The messages and blocks of Anthropic's API, and the messages of a chat."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from naiad.frontend.field import shown
from naiad.openai_server.api.errors import APIError

_ROLES = ("user", "assistant", "system")
# What blocks have besides their text: the prefix cache works by itself, and answers have no citations.
_WITHOUT_EFFECT = ("cache_control", "citations")
_EXPECTED = (
    "expected text, tool_use of the assistant or tool_result of the user, as the model reads only text"
)
_BETWEEN_TURNS = "\n\n"


def messages_of(
    messages: Sequence[dict[str, Any]], system: str | Sequence[dict[str, Any]] | None
) -> list[dict[str, Any]]:
    """Return the messages of the chat; consecutive messages of one role become one.

    Raises:
        APIError: a message is malformed, or holds what is not supported.
    """
    if not messages:
        raise APIError(400, "messages is empty: expected at least one message.", param="messages")
    turns = [] if system is None else [{"role": "system", "content": _text("system", system)}]
    for index, message in enumerate(messages):
        turns += _turns(f"messages[{index}]", message)
    # Each turn of a tool's result has a key of its own.
    groups = groupby(enumerate(turns), lambda each: each[0] if each[1]["role"] == "tool" else each[1]["role"])
    return [_joined([turn for _, turn in group]) for _, group in groups]


def _joined(turns: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Make one turn of turns of one role."""
    if len(turns) == 1:
        return turns[0]
    texts = [turn["content"] for turn in turns if turn["content"]]
    calls = [call for turn in turns for call in turn.get("tool_calls", ())]
    joined = {"role": turns[0]["role"], "content": _BETWEEN_TURNS.join(texts)}
    return joined | {"tool_calls": calls} if calls else joined


def _turns(place: str, message: dict[str, Any]) -> list[dict[str, Any]]:
    """The turns of a message: results of tools have turns of their own."""
    for name, value in message.items():
        if name not in ("role", "content") and value is not None:
            problem = f"{place}.{name[:80]} = {shown(value)} is not supported: expected role and content"
            raise _error(place, problem)
    role, content = message.get("role"), message.get("content")
    if role not in _ROLES:
        raise _error(place, f"{place}.role = {shown(role)}: expected {', '.join(_ROLES)}")
    if not isinstance(content, list):
        return [{"role": role, "content": _text(f"{place}.content", content)}]
    results, calls, texts = [], [], []
    for index, block in enumerate(content):
        at = f"{place}.content[{index}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_result" and role == "user":
            results.append(_result(at, block))
        elif kind == "tool_use" and role == "assistant":
            calls.append(_call(at, block))
        else:
            texts.append(_block(at, block))
    turn: dict[str, Any] = {"role": role, "content": "".join(texts)}
    if calls:
        turn["tool_calls"] = calls
    return results if results and not texts else [*results, turn]


def _result(place: str, block: dict[str, Any]) -> dict[str, Any]:
    _check_keys(place, block, ("tool_use_id", "content", "is_error"))
    content, is_error = block.get("content"), block.get("is_error")
    text = "" if content is None else _text(f"{place}.content", content)
    if not isinstance(is_error, bool | None):
        raise _error(place, f"{place}.is_error = {shown(is_error)}: expected true or false")
    # Chat templates have no other place for it.
    text = f"Error: {text}" if is_error else text
    return {
        "role": "tool",
        "tool_call_id": _string(f"{place}.tool_use_id", block.get("tool_use_id")),
        "content": text,
    }


def _call(place: str, block: dict[str, Any]) -> dict[str, Any]:
    _check_keys(place, block, ("id", "name", "input"))
    call_id, name = (_string(f"{place}.{key}", block.get(key)) for key in ("id", "name"))
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        raise _error(place, f"{place}.input = {shown(arguments)}: expected an object")
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"id": call_id, "type": "function", "function": function}


def _text(place: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _error(place, f"{place} = {shown(content)}: expected a string, or a list of blocks")
    return "".join(_block(f"{place}[{index}]", block) for index, block in enumerate(content))


def _block(place: str, block: Any) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    if kind != "text":
        raise _error(place, f"{place}.type = {shown(kind)} is not supported: {_EXPECTED}")
    _check_keys(place, block, ("text",))
    text = block.get("text")
    if not isinstance(text, str):
        raise _error(place, f"{place}.text = {shown(text)}: expected a string")
    return text


def _check_keys(place: str, block: dict[str, Any], keys: Sequence[str]) -> None:
    for name, value in block.items():
        if name not in ("type", *keys, *_WITHOUT_EFFECT) and value is not None:
            problem = f"{place}.{name[:80]} = {shown(value)} is not supported: expected {', '.join(keys)}"
            raise _error(place, problem)


def _string(place: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise _error(place, f"{place} = {shown(value)}: expected a string")
    return value


def _error(place: str, problem: str) -> APIError:
    return APIError(400, f"{problem}.", param=place.partition("[")[0])
