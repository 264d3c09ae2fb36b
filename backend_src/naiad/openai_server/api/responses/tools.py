"""The tools of a response, and those of the chat that it asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from naiad.frontend.field import shown
from naiad.openai_server.api.errors import APIError
from naiad.openai_server.api.responses.answers import FunctionTool, ToolChoice
from naiad.openai_server.api.tools import MODES, choice_without_tools, read_function


def chat_tools(sent: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """The tools of the chat.

    Raises:
        APIError: a tool is not valid, or no function.
    """
    if sent is None:
        return None
    return [_chat_tool(f"tools[{index}]", tool) for index, tool in enumerate(sent)]


def chat_tool_choice(
    sent: str | Mapping[str, Any] | None, tools: Sequence[Any] | None
) -> str | dict[str, Any] | None:
    """The choice of the chat.

    Args:
        sent: the choice.
        tools: the tools of the response.

    Raises:
        APIError: it is not valid, or names a tool where there are none.
    """
    if sent is None or (isinstance(sent, str) and sent in MODES):
        return sent
    named = sent if isinstance(sent, Mapping) else {}
    if named.get("type") != "function" or not isinstance(named.get("name"), str) or len(named) != 2:
        expected = "expected none, auto, required or {'type': 'function', 'name': NAME}"
        message = f"tool_choice = {shown(sent)} is not supported: {expected}."
        raise APIError(400, message, param="tool_choice")
    if not tools:
        raise choice_without_tools(sent)
    return {"type": "function", "function": {"name": named["name"]}}


def shown_tools(sent: Sequence[Mapping[str, Any]] | None) -> list[FunctionTool]:
    """The tools as the answer repeats them; they have been read."""
    keys = ("description", "parameters", "strict")
    return [FunctionTool(name=tool["name"], **{key: tool.get(key) for key in keys}) for tool in sent or ()]


def shown_choice(sent: str | Mapping[str, Any] | None) -> str | ToolChoice:
    """The choice as the answer repeats it; it has been read."""
    if sent is None or isinstance(sent, str):
        return sent or "auto"
    return ToolChoice(sent["name"])


def _chat_tool(place: str, tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        message = f"{place}.type = {shown(tool.get('type'))} is not supported: expected 'function'."
        raise APIError(400, message, param="tools")
    function = {key: value for key, value in tool.items() if key != "type"}
    read_function(place, function)
    return {"type": "function", "function": function}
