"""The messages of a chat, as clients write them, and how they are rendered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from naiad.frontend.field import shown
from naiad.openai_server.api.bodies import ChatBody, TokenizeBody
from naiad.openai_server.api.content_parts import text_key, unknown_part_keys
from naiad.openai_server.api.errors import APIError
from naiad.openai_server.api.tools import Tool
from naiad.tokenization import MAX_LEVELS, ChatOptions, is_too_deep

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
_TOOL_KEYS = ("tool_calls", "tool_call_id")
# Keys that only messages of these roles have.
_KEYS_OF_ROLES = {"assistant": ("tool_calls",), "tool": ("tool_call_id",)}
_MAX_VARIABLES_BYTES = 16 * 1024
# OpenAI's name for the role that templates call "system".
_ROLES = {"developer": "system"}


def plain_messages(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return each message as {role, content}, both text, with the `name` of its speaker if it has one.

    An assistant's message may have `tool_calls`, whose arguments become an object, as chat templates expect
    it, and that of a tool has `tool_call_id`.

    Raises:
        APIError: a message is malformed, or holds what is not supported: anything but text.
    """
    if not messages:
        raise APIError(400, "messages is empty: expected at least one message.", param="messages")
    return [_plain(f"messages[{index}]", message) for index, message in enumerate(messages)]


def chat_options(
    body: ChatBody | TokenizeBody, messages: Sequence[Mapping[str, Any]] = (), tools: Sequence[Tool] = ()
) -> ChatOptions:
    """How the messages of a body are rendered.

    Args:
        body: the body.
        messages: its messages, as `plain_messages` returns them.
        tools: what the model may call.

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
    speaks_tools = bool(tools) or any(key in message for message in messages for key in _TOOL_KEYS)
    shown_tools = tuple(tool.as_shown for tool in tools)
    return ChatOptions(adds, continues, variables, tools=shown_tools, speaks_tools=speaks_tools)


def _plain(place: str, message: dict[str, Any]) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str):
        raise _error(f"{place}.role = {shown(role)}: expected a string")
    keys = ("role", "content", "name", *_KEYS_OF_ROLES.get(role, ()))
    for name, value in message.items():
        if name not in (*keys, *_WITHOUT_EFFECT) and value not in (None, [], ""):
            known = f"{', '.join(keys[:-1])} and {keys[-1]}"
            raise _error(f"{place}.{name[:80]} = {shown(value)} is not supported: expected {known}")
    calls = message.get("tool_calls") if role == "assistant" else None
    content = message.get("content")
    if content is None and calls:
        content = ""
    text = _text(f"{place}.content", content)
    plain: dict[str, Any] = {"role": _ROLES.get(role, role), "content": text}
    # Clients write "" or null where nobody has a name.
    plain |= {"name": message["name"]} if message.get("name") else {}
    if calls:
        plain["tool_calls"] = _calls(f"{place}.tool_calls", calls)
    if role == "tool":
        plain["tool_call_id"] = _string(f"{place}.tool_call_id", message.get("tool_call_id"))
    return plain


def _calls(place: str, calls: Any) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise _error(f"{place} = {shown(calls)}: expected a list")
    return [_call(f"{place}[{index}]", call) for index, call in enumerate(calls)]


def _call(place: str, call: Any) -> dict[str, Any]:
    kind = call.get("type", "function") if isinstance(call, dict) else None
    if kind != "function":
        raise _error(f"{place}.type = {shown(kind)} is not supported: expected 'function'")
    function = call.get("function")
    if not isinstance(function, dict):
        raise _error(f"{place}.function = {shown(function)}: expected an object")
    for at, sent, keys in (
        (place, call, ("id", "type", "function", "index")),
        (f"{place}.function", function, ("name", "arguments")),
    ):
        for key, value in sent.items():
            if key not in keys and value is not None:
                raise _error(f"{at}.{key[:80]} = {shown(value)} is not supported: expected {', '.join(keys)}")
    name = _string(f"{place}.function.name", function.get("name"))
    arguments = read_arguments(f"{place}.function.arguments", function.get("arguments"))
    made = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"id": _string(f"{place}.id", call.get("id")), **made}


def read_arguments(place: str, sent: Any, param: str = "messages") -> dict[str, Any]:
    """Read the arguments of a call that a client sends back: JSON as a text, which may be empty.

    Raises:
        APIError: they are no JSON object, or nested too deep.
    """
    try:
        arguments = msgspec.json.decode(sent) if sent else {}
    except (msgspec.DecodeError, RecursionError, TypeError):
        arguments = None
    if not isinstance(sent, str | None) or not isinstance(arguments, dict):
        raise APIError(400, f"{place} = {shown(sent)}: expected a JSON object as text.", param=param)
    if is_too_deep(arguments):
        message = f"{place} is nested too deep: expected at most {MAX_LEVELS} levels."
        raise APIError(400, message, param=param)
    return arguments


def _string(place: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise _error(f"{place} = {shown(value)}: expected a string")
    return value


def _error(problem: str) -> APIError:
    return APIError(400, f"{problem}.", param="messages")


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
    field = text_key(part)
    for key in unknown_part_keys(part):
        raise _error(f"{place}.{key[:80]} = {shown(part[key])} is not supported: expected type and {field}")
    text = part.get(field)
    if not isinstance(text, str):
        raise APIError(400, f"{place}.text = {shown(text)}: expected a string.", param="messages")
    return text
