"""The input of a response: items, as clients write them or send them back, and the messages of a chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from naiad.frontend.field import shown
from naiad.openai_server.api.errors import APIError
from naiad.openai_server.api.messages import read_arguments

_ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_TYPES = ("message", "reasoning", "function_call", "function_call_output")
# What clients send back with an item; nothing of it reaches a template.
_WITHOUT_EFFECT = ("id", "status", "phase")
# What parts have besides their text; the prefix cache works by itself.
_PART_WITHOUT_EFFECT = ("type", "annotations", "logprobs", "prompt_cache_breakpoint")


def messages_of(sent: str | Sequence[dict[str, Any]], instructions: str | None) -> list[dict[str, Any]]:
    """Return the messages of the chat that instructions and an input are.

    Items of the type `reasoning`, which clients send back, are passed over, as chat templates do. Calls join
    the assistant's message before them.

    Raises:
        APIError: an item is malformed, or holds what is not supported: anything but text.
    """
    messages = [] if instructions is None else [{"role": "system", "content": instructions}]
    if isinstance(sent, str):
        return [*messages, {"role": "user", "content": sent}]
    for index, item in enumerate(sent):
        _add(messages, f"input[{index}]", item)
    if not any(item.get("type") != "reasoning" for item in sent):
        raise APIError(400, "input has no message: expected text, or at least one message.", param="input")
    return messages


def _add(messages: list[dict[str, Any]], place: str, item: dict[str, Any]) -> None:
    match item.get("type", "message"):
        case "reasoning":
            pass
        case "message":
            messages.append(_message(place, item))
        case "function_call":
            call = _call(place, item)
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            messages[-1].setdefault("tool_calls", []).append(call)
        case "function_call_output":
            messages.append(_result(place, item))
        case kind:
            raise _error(f"{place}.type = {shown(kind)} is not supported: expected {', '.join(_TYPES)}")


def _call(place: str, item: dict[str, Any]) -> dict[str, Any]:
    _check_keys(place, item, ("call_id", "name", "arguments"))
    call_id, name = (_string(f"{place}.{key}", item.get(key)) for key in ("call_id", "name"))
    read_arguments(f"{place}.arguments", item.get("arguments"), "input")
    function = {"name": name, "arguments": item.get("arguments")}
    return {"id": call_id, "type": "function", "function": function}


def _result(place: str, item: dict[str, Any]) -> dict[str, Any]:
    _check_keys(place, item, ("call_id", "output"))
    content = _content(f"{place}.output", item.get("output"))
    return {
        "role": "tool",
        "tool_call_id": _string(f"{place}.call_id", item.get("call_id")),
        "content": content,
    }


def _check_keys(place: str, item: dict[str, Any], keys: tuple[str, ...]) -> None:
    for name, value in item.items():
        if name not in ("type", *keys, *_WITHOUT_EFFECT) and value is not None:
            known = f"{', '.join(keys[:-1])} and {keys[-1]}"
            raise _error(f"{place}.{name[:80]} = {shown(value)} is not supported: expected {known}")


def _string(place: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise _error(f"{place} = {shown(value)}: expected a string")
    return value


def _message(place: str, item: dict[str, Any]) -> dict[str, Any]:
    _check_keys(place, item, ("role", "content"))
    role = item.get("role")
    if role not in _ROLES:
        raise _error(f"{place}.role = {shown(role)}: expected {', '.join(_ROLES)}")
    return {"role": role, "content": _content(f"{place}.content", item.get("content"))}


def _content(place: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _error(f"{place} = {shown(content)}: expected a string, or a list of parts")
    return "".join(_text(f"{place}[{number}]", part) for number, part in enumerate(content))


def _text(place: str, part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    key = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if key is None:
        expected = "expected input_text or output_text, as the model reads only text"
        raise _error(f"{place}.type = {shown(kind)} is not supported: {expected}")
    for name, value in part.items():
        if name not in (key, *_PART_WITHOUT_EFFECT) and value is not None:
            raise _error(f"{place}.{name[:80]} = {shown(value)} is not supported: expected {key}")
    text = part.get(key)
    if not isinstance(text, str):
        raise _error(f"{place}.{key} = {shown(text)}: expected a string")
    return text


def _error(problem: str) -> APIError:
    return APIError(400, f"{problem}.", param="input")
