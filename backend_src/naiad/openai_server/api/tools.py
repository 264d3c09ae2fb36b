"""The tools of a request: what they are, and how they may be called."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from naiad.frontend.field import shown
from naiad.openai_server.api.errors import APIError

MAX_TOOLS = 128
MAX_TOOLS_BYTES = 256 * 1024
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_NAME_RULE = "1 … 128 letters, digits or _ . : / -"
_FUNCTION_KEYS = ("name", "description", "parameters", "strict")
MODES = ("none", "auto", "required")


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a model may call.

    Attributes:
        name: its name.
        description: what it does; "" if it is not said.
        parameters: the JSON schema of its arguments.
        is_strict: calls have to obey the schema.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    is_strict: bool = False

    @property
    def as_shown(self) -> dict[str, Any]:
        """The tool as chat templates expect it."""
        function: dict[str, Any] = {"name": self.name, "description": self.description}
        function["parameters"] = self.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request, and how they may be called.

    Attributes:
        tools: the tools; empty: nothing is called.
        callable: those of them that may be called.
        is_required: the answer has to be calls.
        allows_several: whether there may be more than one call.
    """

    tools: tuple[Tool, ...] = ()
    callable: tuple[Tool, ...] = ()
    is_required: bool = False
    allows_several: bool = True

    @property
    def is_constrained(self) -> bool:
        """Whether a grammar holds for calls."""
        return self.is_required or any(tool.is_strict for tool in self.callable)


NO_TOOLS = ToolUse()


def read_tools(sent: Sequence[Any] | None, choice: Any, parallel: bool | None) -> ToolUse:
    """Read the fields `tools`, `tool_choice` and `parallel_tool_calls` of a chat.

    Raises:
        APIError: a field is not valid.
    """
    tools = _tools(sent or ())
    mode, name = _choice(choice)
    if mode != "auto" and mode != "none" and not tools:
        raise choice_without_tools(choice)
    if mode == "none" or not tools:
        return NO_TOOLS
    callable_tools = tools
    if name:
        callable_tools = tuple(tool for tool in tools if tool.name == name)
        if not callable_tools:
            names = ", ".join(tool.name for tool in tools[:8])
            raise _error(f"tool_choice names {name[:80]!r}: expected one of tools: {names}", "tool_choice")
    return ToolUse(
        tools=tools,
        callable=callable_tools,
        is_required=mode in ("required", "named"),
        allows_several=parallel is not False and not name,
    )


def choice_without_tools(sent: Any) -> APIError:
    """The error for a choice that asks for a call where there are no tools."""
    return _error(f"tool_choice = {shown(sent)}: expected tools with it", "tool_choice")


def _tools(sent: Sequence[Any]) -> tuple[Tool, ...]:
    if len(sent) > MAX_TOOLS:
        raise _error(f"tools has {len(sent)} entries: at most {MAX_TOOLS} are allowed")
    num_bytes = len(msgspec.json.encode(sent))
    if num_bytes > MAX_TOOLS_BYTES:
        raise _error(f"tools has {num_bytes} bytes: at most {MAX_TOOLS_BYTES} are allowed")
    tools = tuple(_tool(f"tools[{index}]", each) for index, each in enumerate(sent))
    names = [tool.name for tool in tools]
    for name in names:
        if names.count(name) > 1:
            raise _error(f"tools has {name!r} more than once: expected different names")
    return tools


def _tool(place: str, sent: Any) -> Tool:
    kind = sent.get("type") if isinstance(sent, Mapping) else None
    if kind != "function":
        raise _error(f"{place}.type = {shown(kind)} is not supported: expected 'function'")
    function = sent.get("function")
    if not isinstance(function, Mapping):
        raise _error(f"{place}.function = {shown(function)}: expected an object")
    _check_keys(place, sent, ("type", "function"))
    return read_function(f"{place}.function", function)


def read_function(place: str, sent: Mapping[str, Any], schema_name: str = "parameters") -> Tool:
    """Read a function: its name, description, parameters, and whether it is strict.

    Args:
        place: where it is, for errors.
        sent: the function.
        schema_name: what `parameters` are called, for errors.

    Raises:
        APIError: it is not valid.
    """
    _check_keys(place, sent, _FUNCTION_KEYS)
    name, description, parameters = (sent.get(key) for key in _FUNCTION_KEYS[:3])
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _error(f"{place}.name = {shown(name)}: expected {_NAME_RULE}")
    if not isinstance(description, str | None):
        raise _error(f"{place}.description = {shown(description)}: expected a string")
    if not isinstance(parameters, Mapping | None):
        raise _error(f"{place}.{schema_name} = {shown(parameters)}: expected a JSON schema")
    if parameters and parameters.get("type", "object") != "object":
        raise _error(f"{place}.{schema_name}.type = {shown(parameters['type'])}: expected 'object'")
    if parameters and not isinstance(parameters.get("properties", {}), Mapping):
        raise _error(
            f"{place}.{schema_name}.properties = {shown(parameters['properties'])}: expected an object"
        )
    required = parameters.get("required", []) if parameters else []
    if not isinstance(required, list) or not all(isinstance(each, str) for each in required):
        raise _error(f"{place}.{schema_name}.required = {shown(required)}: expected a list of names")
    is_strict = sent.get("strict")
    if not isinstance(is_strict, bool | None):
        raise _error(f"{place}.strict = {shown(is_strict)}: expected true or false")
    return Tool(name, description or "", parameters or {}, bool(is_strict))


def _choice(sent: Any) -> tuple[str, str]:
    """The mode of a choice, and the name of the tool that it names."""
    if sent is None:
        return "auto", ""
    if isinstance(sent, str):
        if sent in MODES:
            return sent, ""
    elif isinstance(sent, Mapping) and sent.get("type") == "function":
        function = sent.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if isinstance(name, str) and set(sent) == {"type", "function"}:
            return "named", name
    expected = "expected none, auto, required or {'type': 'function', 'function': {'name': NAME}}"
    raise _error(f"tool_choice = {shown(sent)} is not supported: {expected}", "tool_choice")


def _check_keys(place: str, sent: Mapping[str, Any], known: Sequence[str]) -> None:
    for key, value in sent.items():
        if key not in known and value is not None:
            problem = (
                f"{place}.{str(key)[:80]} = {shown(value)} is not supported: expected {', '.join(known)}"
            )
            raise _error(problem)


def _error(problem: str, param: str = "tools") -> APIError:
    return APIError(400, f"{problem}.", param=param)
