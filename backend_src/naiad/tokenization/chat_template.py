"""Renders messages as the text that the checkpoint was trained to continue."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jinja2
import jinja2.meta

from naiad.errors import InvalidRequestError
from naiad.tokenization.template_sandbox import MAX_RENDER_S, RenderTimeoutError, TemplateSandbox, render
from naiad.tokenization.tools_in_messages import reads_tools_in_messages, with_tools

_ROLE = re.compile(r"[A-Za-z0-9_-]{1,32}")
# As OpenAI's API has it.
_NAME = re.compile(r"[^\s<|\\/>]{1,64}")
_KEYS = {"role", "content", "name"}
_TOOL_KEYS = ("tool_calls", "tool_call_id")
_MAX_SHOWN_CHARS = 200


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How a chat is rendered.

    Attributes:
        add_generation_prompt: end where the assistant begins to speak.
        continues_last_message: end inside the last message, which the model goes on with.
        template_values: further variables of the checkpoint's template, such as `enable_thinking`.
        tools: what the model may call, as templates expect it.
        speaks_tools: messages may hold `tool_calls` and `tool_call_id`.
    """

    add_generation_prompt: bool = True
    continues_last_message: bool = False
    template_values: Mapping[str, Any] = field(default_factory=dict)
    tools: tuple[Mapping[str, Any], ...] = ()
    speaks_tools: bool = False


# What Python's compiler raises for the code that Jinja makes of some templates.
_COMPILER_ERRORS = (SyntaxError, ValueError, RecursionError, MemoryError)

PLAIN_CHAT = ChatOptions()


class ChatTemplate:
    """A checkpoint's template, compiled once."""

    def __init__(self, source: str | None, named_tokens: Mapping[str, str | None]) -> None:
        """Compile the template; if that fails, `render` reports the error.

        Args:
            source: the Jinja source; None if the checkpoint has no template.
            named_tokens: the values of the template's variables `bos_token`, `eos_token`, …
        """
        self._values = {name: token for name, token in named_tokens.items() if token is not None}
        self._template: jinja2.Template | None = None
        self._fault: str | None = None
        self._problem = "messages: the checkpoint has no chat template; send text_input"
        self.takes_tools = self._reads_tools_in_messages = False
        if source is None:
            return
        try:
            sandbox = TemplateSandbox()
            self._template = sandbox.from_string(source)
            parsed = sandbox.parse(source)
            takes_variable = "tools" in jinja2.meta.find_undeclared_variables(parsed)
            self._reads_tools_in_messages = not takes_variable and reads_tools_in_messages(source, parsed)
            self.takes_tools = takes_variable or self._reads_tools_in_messages
        except (jinja2.TemplateError, *_COMPILER_ERRORS) as error:
            self._fault = _shown(error)
            self._problem = f"messages: the checkpoint's chat template can not be used: {self._fault}"

    @property
    def fault(self) -> str | None:
        """Why the checkpoint's template can not be compiled; None if it can, or if there is none."""
        return self._fault

    def render(self, messages: list[dict[str, Any]], options: ChatOptions = PLAIN_CHAT) -> str:
        """Render the messages.

        Raises:
            InvalidRequestError: there is no usable template, or it refused these messages, or
                it took too long.
        """
        if self._template is None:
            raise InvalidRequestError(self._problem)
        if self._reads_tools_in_messages:
            messages = with_tools(messages, options.tools)
        values: dict[str, Any] = {
            **options.template_values,
            **self._values,
            "messages": messages,
            "tools": list(options.tools) or None,
            "documents": None,
            "add_generation_prompt": options.add_generation_prompt,
        }
        try:
            text = render(self._template, values)
        except RenderTimeoutError:
            raise InvalidRequestError(
                f"messages: the chat template took longer than {MAX_RENDER_S} s"
            ) from None
        except Exception as error:
            raise InvalidRequestError(f"messages: the chat template failed: {_shown(error)}") from error
        return _continued(text, messages[-1]) if options.continues_last_message else text


def parse_messages(messages_json: str, speaks_tools: bool = False) -> list[dict[str, Any]]:
    """Read the field `messages`.

    Args:
        messages_json: JSON.
        speaks_tools: messages may hold `tool_calls` and `tool_call_id`, which the caller has checked.

    Raises:
        InvalidRequestError: the text is not a JSON list of at least one {role, content}, both strings, the
            role a single word, with or without `name`.
    """
    try:
        messages = json.loads(messages_json)
    except (ValueError, RecursionError):
        raise InvalidRequestError("messages: not JSON: expected a list of {role, content}") from None
    if not isinstance(messages, list) or not messages:
        raise InvalidRequestError("messages: expected a JSON list of at least one {role, content}")
    for index, message in enumerate(messages):
        _check_message(index, message, {*_KEYS, *_TOOL_KEYS} if speaks_tools else _KEYS)
    return messages


def _check_message(index: int, message: object, keys: set[str]) -> None:
    if not isinstance(message, dict):
        raise InvalidRequestError(f"messages[{index}]: expected an object with role and content")
    unknown = sorted(set(message) - keys)
    if unknown:
        raise InvalidRequestError(
            f"messages[{index}]: key {unknown[0][:_MAX_SHOWN_CHARS]!r} is not supported: "
            "expected role, content and name"
        )
    role = message.get("role")
    if not isinstance(role, str) or not _ROLE.fullmatch(role):
        raise InvalidRequestError(f"messages[{index}].role: expected a word such as user or assistant")
    if "name" in message:
        _check_name(f"messages[{index}].name", message["name"])
    content = message.get("content")
    if not isinstance(content, str):
        raise InvalidRequestError(f"messages[{index}].content: expected a string")
    for key in ("name", "content"):
        try:
            message.get(key, "").encode()
        except UnicodeEncodeError:
            raise InvalidRequestError(f"messages[{index}].{key}: holds half a surrogate pair") from None


def _check_name(place: str, name: object) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequestError(
            f"{place} = {str(name)[:_MAX_SHOWN_CHARS]!r}: expected 1 … 64 characters, none of them white "
            "space or one of < | \\ / >"
        )


def _continued(text: str, last_message: Mapping[str, Any]) -> str:
    """Cut the text after the last message's content, so that the model goes on with it.

    Raises:
        InvalidRequestError: the template does not show the content, or calls follow it.
    """
    last_content = last_message["content"]
    content = last_content.strip()
    place = text.rfind(content)
    reason = ""
    if last_message.get("tool_calls"):
        reason = "tool_calls follow it: expected none"
    elif not content:
        reason = "it is empty: expected text"
    elif place < 0:
        reason = "the chat template does not show it as it is"
    if reason:
        raise InvalidRequestError(
            f"messages: the answer can not continue the content of the last message, as {reason}"
        )
    end = place + len(content)
    # Spaces at the content's end belong to it if the template keeps them.
    spaces = last_content[len(last_content.rstrip()) :]
    return text[: end + len(spaces)] if text.startswith(spaces, end) else text[:end]


def _shown(error: BaseException) -> str:
    return str(error)[:_MAX_SHOWN_CHARS] or type(error).__name__
