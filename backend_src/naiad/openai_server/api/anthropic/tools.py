"""The tools of a message, and those of the chat that it asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from naiad.frontend.field import shown
from naiad.openai_server.api.errors import APIError
from naiad.openai_server.api.tools import choice_without_tools, read_function

_KEYS = ("type", "name", "description", "input_schema", "strict")
# The prefix cache works by itself.
_WITHOUT_EFFECT = ("cache_control",)
_MODES = {"auto": "auto", "any": "required", "none": "none"}
_EXPECTED = "expected {'type': 'auto'}, 'any', 'none' or 'tool' with the name of one"


def chat_tools(sent: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """The tools of the chat.

    Raises:
        APIError: a tool is not valid, or one that the server of Anthropic's API runs itself.
    """
    if sent is None:
        return None
    return [_chat_tool(f"tools[{index}]", tool) for index, tool in enumerate(sent)]


def chat_tool_choice(sent: Mapping[str, Any] | None, tools: Sequence[Any] | None) -> dict[str, Any]:
    """The fields of the chat that say how tools may be called.

    Args:
        sent: the choice.
        tools: the tools of the message.

    Raises:
        APIError: the choice is not valid, or asks for a call where there are no tools.
    """
    if sent is None:
        return {}
    kind, name, is_single = (sent.get(key) for key in ("type", "name", "disable_parallel_tool_use"))
    known = {"type", "disable_parallel_tool_use", *(("name",) if kind == "tool" else ())}
    choice: str | dict[str, Any] | None = _MODES.get(str(kind))
    if kind == "tool" and isinstance(name, str):
        choice = {"type": "function", "function": {"name": name}}
    if choice is None or set(sent) - known or not isinstance(is_single, bool | None):
        message = f"tool_choice = {shown(sent)} is not supported: {_EXPECTED}."
        raise APIError(400, message, param="tool_choice")
    if kind in ("any", "tool") and not tools:
        raise choice_without_tools(sent)
    return {"tool_choice": choice, "parallel_tool_calls": not is_single}


def _chat_tool(place: str, tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type", "custom") not in ("custom", None):
        message = f"{place}.type = {shown(tool['type'])} is not supported: expected 'custom'."
        raise APIError(400, message, param="tools")
    for key, value in tool.items():
        if key not in (*_KEYS, *_WITHOUT_EFFECT) and value is not None:
            message = f"{place}.{key[:80]} = {shown(value)} is not supported: expected {', '.join(_KEYS)}."
            raise APIError(400, message, param="tools")
    if not isinstance(tool.get("input_schema"), Mapping):
        message = f"{place}.input_schema = {shown(tool.get('input_schema'))}: expected a JSON schema."
        raise APIError(400, message, param="tools")
    function = {key: tool.get(key) for key in ("name", "description", "strict")}
    function["parameters"] = tool["input_schema"]
    read_function(place, function, "input_schema")
    return {"type": "function", "function": function}
