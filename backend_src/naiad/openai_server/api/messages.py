"""The messages of a chat, as clients write them, and how they are rendered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from naiad.frontend.field import shown
from naiad.openai_server.api.bodies import ChatBody, TokenizeBody
from naiad.openai_server.api.errors import APIError
from naiad.tokenization import ChatOptions

_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
# What clients send back with an answer; nothing of it reaches a template.
_WITHOUT_EFFECT = ("refusal", "annotations", "reasoning", "reasoning_content")
# Variables that the chat template gets from the server.
_SERVERS_VARIABLES = (
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "documents",
    "messages",
    "return_dict",
    "return_tensors",
    "tokenize",
    "tools",
)
_MAX_VARIABLES_BYTES = 16 * 1024
# OpenAI's name for the role that templates call "system".
_ROLES = {"developer": "system"}


def plain_messages(messages: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """Return each message as {role, content}, both text, with the `name` of its speaker if it has one.

    Raises:
        APIError: a message is malformed, or holds what is not supported: anything but text.
    """
    if not messages:
        raise APIError(400, "messages is empty: expected at least one message.", param="messages")
    return [_plain(f"messages[{index}]", message) for index, message in enumerate(messages)]


def chat_options(body: ChatBody | TokenizeBody) -> ChatOptions:
    """How the messages of a body are rendered.

    Raises:
        APIError: the options contradict each other, or a variable of the template is not allowed.
    """
    continues = bool(body.continue_final_message)
    if continues and body.add_generation_prompt:
        message = "continue_final_message = true: expected add_generation_prompt = false with it."
        raise APIError(400, message, param="continue_final_message")
    adds = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    variables = body.chat_template_kwargs or {}
    for name in variables:
        if name in _SERVERS_VARIABLES:
            message = f"chat_template_kwargs holds {name}: expected none of {', '.join(_SERVERS_VARIABLES)}."
            raise APIError(400, message, param="chat_template_kwargs")
    num_bytes = len(msgspec.json.encode(variables))
    if num_bytes > _MAX_VARIABLES_BYTES:
        message = f"chat_template_kwargs has {num_bytes} bytes: at most {_MAX_VARIABLES_BYTES} are allowed."
        raise APIError(400, message, param="chat_template_kwargs")
    return ChatOptions(adds, continues, variables)


def _plain(place: str, message: dict[str, Any]) -> dict[str, str]:
    for name, value in message.items():
        if name not in ("role", "content", "name", *_WITHOUT_EFFECT) and value not in (None, [], ""):
            problem = (
                f"{place}.{name[:80]} = {shown(value)} is not supported: expected role, content and name."
            )
            raise APIError(400, problem, param="messages")
    role = message.get("role")
    if not isinstance(role, str):
        raise APIError(400, f"{place}.role = {shown(role)}: expected a string.", param="messages")
    plain = {"role": _ROLES.get(role, role), "content": _text(f"{place}.content", message.get("content"))}
    # Clients write "" or null where nobody has a name.
    return plain | {"name": message["name"]} if message.get("name") else plain


def _text(place: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        problem = f"{place} = {shown(content)}: expected a string, or a list of parts of the type text."
        raise APIError(400, problem, param="messages")
    return "".join(_part(f"{place}[{index}]", part) for index, part in enumerate(content))


def _part(place: str, part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in _TEXT_PARTS:
        problem = (
            f"{place}.type = {shown(kind)} is not supported: expected text, as the model reads only text."
        )
        raise APIError(400, problem, param="messages")
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        raise APIError(400, f"{place}.text = {shown(text)}: expected a string.", param="messages")
    return text
