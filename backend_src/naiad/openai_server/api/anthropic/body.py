"""The bodies of `POST /v1/messages` and `/v1/messages/count_tokens`, and the chats that they ask for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from naiad.openai_server.api.anthropic.blocks import messages_of
from naiad.openai_server.api.anthropic.tools import chat_tool_choice, chat_tools
from naiad.openai_server.api.bodies import ANY, ChatBody, OtherFields, RequestBody, SamplingBody
from naiad.openai_server.api.errors import APIError
from naiad.openai_server.api.reading import AskedGeneration, RequestReader

# The prefix cache works by itself, so marks of what to cache change nothing.
_ACCEPTED: Mapping[str, tuple[Any, ...]] = {
    "cache_control": (ANY,),
    "service_tier": ("auto", "standard_only"),
}
_REFUSED: Mapping[str, tuple[Any, ...]] = {
    "container": (),
    "context_management": (),
    "diagnostics": (),
    "inference_geo": (),
    "mcp_servers": ([],),
    "output_config": ({},),
    "output_format": (),
    "speed": ("standard",),
    # What a model reasons by itself is not sent.
    "thinking": ({"type": "disabled"},),
    "user_profile_id": (),
    "workspace_id": (),
}
_NAMES = {"max_completion_tokens": "max_tokens", "stop": "stop_sequences"}


class Metadata(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Says who asks; it has no effect."""

    user_id: str | None = None


class MessageBody(SamplingBody, kw_only=True):
    """The body of `POST /v1/messages`."""

    others: ClassVar[OtherFields] = OtherFields(_ACCEPTED, _REFUSED)

    max_tokens: int
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: list[str] | None = None
    metadata: Metadata | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CountBody(RequestBody, kw_only=True):
    """The body of `POST /v1/messages/count_tokens`."""

    others: ClassVar[OtherFields] = OtherFields(_ACCEPTED, _REFUSED)

    model: str
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenCount(msgspec.Struct):
    """The body of an answer of `/v1/messages/count_tokens`."""

    input_tokens: int


def read_message(reader: RequestReader, body: MessageBody, request_id: str) -> AskedGeneration:
    """Read the body as that of a chat.

    Raises:
        APIError: the body is not valid.
    """
    chat = ChatBody(
        **{name: getattr(body, name) for name in SamplingBody.__struct_fields__},
        **_prompt(body),
        max_completion_tokens=body.max_tokens,
        stop=body.stop_sequences,
    )
    return reader.chat(chat, request_id, _NAMES)


def num_tokens(reader: RequestReader, body: CountBody) -> TokenCount:
    """Count the tokens of a prompt.

    Raises:
        APIError: the body is not valid.
    """
    chat = ChatBody(model=body.model, **_prompt(body))
    return TokenCount(reader.num_chat_tokens(chat, _NAMES))


def _check_continued(place: str, message: Mapping[str, Any]) -> None:
    """Refuse a last message of the assistant that nothing can be added to.

    Raises:
        APIError: it has no text, or a `tool_use`.
    """
    if message.get("tool_calls"):
        problem = "holds tool_use: expected a message of the user with its tool_result after it"
    elif not message["content"].strip():
        problem = "has no text: expected text, which the answer continues, or a message of the user after it"
    else:
        return
    text = f"{place} is the last message, of the assistant, and {problem}."
    raise APIError(400, text, param="messages")


def _prompt(body: MessageBody | CountBody) -> dict[str, Any]:
    """The fields of a chat's prompt; the answer goes on with a last message of the assistant."""
    messages = messages_of(body.messages, body.system)
    continues = messages[-1]["role"] == "assistant"
    if continues:
        _check_continued(f"messages[{len(body.messages) - 1}]", messages[-1])
    return {
        "messages": messages,
        "continue_final_message": continues,
        "chat_template_kwargs": body.chat_template_kwargs,
        "tools": chat_tools(body.tools),
        **chat_tool_choice(body.tool_choice, body.tools),
    }
