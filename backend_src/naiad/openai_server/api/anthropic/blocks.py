"""The messages and blocks of Anthropic's API, and the messages of a chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from naiad.frontend.field import shown
from naiad.openai_server.api.errors import APIError

_ROLES = ("user", "assistant", "system")
# What blocks have besides their text: the prefix cache works by itself, and answers have no citations.
_WITHOUT_EFFECT = ("cache_control", "citations")
_BETWEEN_TURNS = "\n\n"


def messages_of(
    messages: Sequence[dict[str, Any]], system: str | Sequence[dict[str, Any]] | None
) -> list[dict[str, Any]]:
    """Return the messages of the chat; consecutive messages of one role become one.

    Raises:
        APIError: a message is malformed, or holds what is not supported: anything but text.
    """
    if not messages:
        raise APIError(400, "messages is empty: expected at least one message.", param="messages")
    turns = [] if system is None else [{"role": "system", "content": _text("system", system)}]
    for index, message in enumerate(messages):
        turn = _message(f"messages[{index}]", message)
        if turns and turns[-1]["role"] == turn["role"]:
            turns[-1]["content"] += _BETWEEN_TURNS + turn["content"]
        else:
            turns.append(turn)
    return turns


def _message(place: str, message: dict[str, Any]) -> dict[str, Any]:
    for name, value in message.items():
        if name not in ("role", "content") and value is not None:
            problem = f"{place}.{name[:80]} = {shown(value)} is not supported: expected role and content"
            raise _error(place, problem)
    role = message.get("role")
    if role not in _ROLES:
        raise _error(place, f"{place}.role = {shown(role)}: expected {', '.join(_ROLES)}")
    return {"role": role, "content": _text(f"{place}.content", message.get("content"))}


def _text(place: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _error(place, f"{place} = {shown(content)}: expected a string, or a list of text blocks")
    return "".join(_block(f"{place}[{index}]", block) for index, block in enumerate(content))


def _block(place: str, block: Any) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    if kind != "text":
        expected = "expected text, as the model reads only text"
        raise _error(place, f"{place}.type = {shown(kind)} is not supported: {expected}")
    for name, value in block.items():
        if name not in ("type", "text", *_WITHOUT_EFFECT) and value is not None:
            raise _error(place, f"{place}.{name[:80]} = {shown(value)} is not supported: expected text")
    text = block.get("text")
    if not isinstance(text, str):
        raise _error(place, f"{place}.text = {shown(text)}: expected a string")
    return text


def _error(place: str, problem: str) -> APIError:
    return APIError(400, f"{problem}.", param=place.partition("[")[0])
