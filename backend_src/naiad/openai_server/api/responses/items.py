"""The input of a response: items, as clients write them or send them back, and the messages of a chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from naiad.frontend.field import shown
from naiad.openai_server.api.errors import APIError

_ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
# What clients send back with an item; nothing of it reaches a template.
_WITHOUT_EFFECT = ("id", "status", "phase")
# What parts have besides their text; the prefix cache works by itself.
_PART_WITHOUT_EFFECT = ("type", "annotations", "logprobs", "prompt_cache_breakpoint")


def messages_of(sent: str | Sequence[dict[str, Any]], instructions: str | None) -> list[dict[str, Any]]:
    """Return the messages of the chat that instructions and an input are.

    Items of the type `reasoning`, which clients send back, are passed over, as chat templates do.

    Raises:
        APIError: an item is malformed, or holds what is not supported: anything but text.
    """
    messages = [] if instructions is None else [{"role": "system", "content": instructions}]
    if isinstance(sent, str):
        return [*messages, {"role": "user", "content": sent}]
    for index, item in enumerate(sent):
        if item.get("type") != "reasoning":
            messages.append(_message(f"input[{index}]", item))
    if not any(item.get("type") != "reasoning" for item in sent):
        raise APIError(400, "input has no message: expected text, or at least one message.", param="input")
    return messages


def _message(place: str, item: dict[str, Any]) -> dict[str, Any]:
    kind = item.get("type", "message")
    if kind != "message":
        raise _error(f"{place}.type = {shown(kind)} is not supported: expected message or reasoning")
    for name, value in item.items():
        if name not in ("type", "role", "content", *_WITHOUT_EFFECT) and value is not None:
            raise _error(f"{place}.{name[:80]} = {shown(value)} is not supported: expected role and content")
    role, content = item.get("role"), item.get("content")
    if role not in _ROLES:
        raise _error(f"{place}.role = {shown(role)}: expected {', '.join(_ROLES)}")
    if isinstance(content, str):
        return {"role": role, "content": content}
    if not isinstance(content, list):
        raise _error(f"{place}.content = {shown(content)}: expected a string, or a list of parts")
    texts = [_text(f"{place}.content[{number}]", part) for number, part in enumerate(content)]
    return {"role": role, "content": "".join(texts)}


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
