"""Puts tools and their calls into messages, for chat templates that look for them nowhere else.

The template of Phi-4-mini shows what the system's message has as `tools`, a text, and of other messages only
the content. So calls and results have to be in contents, as that model writes and reads them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2.nodes

_TOOLS_MARKS = ("<|tool|>", "<|/tool|>")
_CALLS_BEGIN, _CALLS_END = "<|tool_call|>", "<|/tool_call|>"
_RESULT_ROLE = "tool_response"


def reads_tools_in_messages(source: str, template: jinja2.nodes.Template) -> bool:
    """Whether a template shows the `tools` of a message between the marks of Phi-4-mini."""
    items = (each.arg for each in template.find_all(jinja2.nodes.Getitem))
    keys = {each.value for each in items if isinstance(each, jinja2.nodes.Const)}
    keys |= {each.attr for each in template.find_all(jinja2.nodes.Getattr)}
    return "tools" in keys and "tool_calls" not in keys and all(mark in source for mark in _TOOLS_MARKS)


def with_tools(
    messages: Sequence[dict[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return messages that hold the tools, and calls and results as contents.

    Args:
        messages: as chat templates expect them, with `tool_calls` and results of the role `tool`.
        tools: each with its `function`.
    """
    shown = [_shown(message) for message in messages]
    if not tools:
        return shown
    if shown[0]["role"] != "system":
        shown.insert(0, {"role": "system", "content": ""})
    shown[0] = {**shown[0], "tools": _written([tool["function"] for tool in tools])}
    return shown


def _shown(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": _RESULT_ROLE, "content": message["content"]}
    if not message.get("tool_calls"):
        return message
    functions = [call["function"] for call in message["tool_calls"]]
    calls = [{"name": each["name"], "arguments": each["arguments"]} for each in functions]
    kept = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**kept, "content": f"{message['content']}{_CALLS_BEGIN}{_written(calls)}{_CALLS_END}"}


def _written(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
