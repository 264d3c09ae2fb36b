"""The body of `POST /v1/responses`, and the chat that it asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from naiad.frontend.field import shown
from naiad.openai_server.api.bodies import ANY, ChatBody, OtherFields, SamplingBody
from naiad.openai_server.api.constraints.formats import read_named_schema
from naiad.openai_server.api.errors import APIError
from naiad.openai_server.api.reading import AskedGeneration, RequestReader
from naiad.openai_server.api.responses.answers import JsonObjectFormat, JsonSchemaFormat, TextFormat
from naiad.openai_server.api.responses.items import messages_of
from naiad.openai_server.api.responses.tools import chat_tool_choice, chat_tools

_ACCEPTED: Mapping[str, tuple[Any, ...]] = {
    "max_tool_calls": (ANY,),
    "prompt_cache_key": (ANY,),
    "prompt_cache_options": (ANY,),
    "prompt_cache_retention": (ANY,),
    "safety_identifier": (ANY,),
    "service_tier": ("auto", "default"),
    "session_id": (ANY,),
    # Nothing is stored, and the answer says so.
    "store": (False, True),
}
_REFUSED: Mapping[str, tuple[Any, ...]] = {
    "access_programs": (),
    "background": (False,),
    "background_options": (),
    "chat_template": (),
    "context_management": ([],),
    "conversation": (),
    "image": (),
    "moderation": (),
    "previous_response_id": (),
    "prompt": (),
    "truncation": ("disabled",),
}
_LOG_PROBS = "message.output_text.logprobs"
# What else an answer may include; reasoning comes in plain text, so there is nothing to encrypt.
_INCLUDABLE = (_LOG_PROBS, "reasoning.encrypted_content")
_FORMAT = "text.format"
_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "logprobs": "include",
    "response_format": _FORMAT,
}


class ResponseStreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What a stream holds besides the answer; it has no effect."""

    include_obfuscation: bool | None = None


class TextOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The form of the text."""

    format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None = None
    verbosity: str | None = None


class ResponseBody(SamplingBody, kw_only=True):
    """The body of `POST /v1/responses`."""

    others: ClassVar[OtherFields] = OtherFields(_ACCEPTED, _REFUSED)

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    stop: str | list[str] | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    text: TextOptions | None = None
    structured_outputs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] | None = None
    stream_options: ResponseStreamOptions | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


def read_response(reader: RequestReader, body: ResponseBody, request_id: str) -> AskedGeneration:
    """Read the body as that of a chat.

    Raises:
        APIError: the body is not valid.
    """
    return reader.chat(_chat_of(body), request_id, _NAMES)


def _chat_of(body: ResponseBody) -> ChatBody:
    _check_options(body)
    has_log_probs = _LOG_PROBS in (body.include or ())
    if body.top_logprobs and not has_log_probs:
        expected = f"expected include to hold {_LOG_PROBS!r} with it"
        raise APIError(400, f"top_logprobs = {body.top_logprobs}: {expected}.", param="top_logprobs")
    return ChatBody(
        **{name: getattr(body, name) for name in SamplingBody.__struct_fields__},
        messages=messages_of(body.input, body.instructions),
        max_completion_tokens=body.max_output_tokens,
        stop=body.stop,
        logprobs=has_log_probs,
        top_logprobs=(body.top_logprobs or 0) if has_log_probs else None,
        chat_template_kwargs=body.chat_template_kwargs,
        response_format=_response_format(body.text.format if body.text else None),
        structured_outputs=body.structured_outputs,
        tools=chat_tools(body.tools),
        tool_choice=chat_tool_choice(body.tool_choice, body.tools),
        parallel_tool_calls=body.parallel_tool_calls,
    )


def _response_format(form: TextFormat | JsonObjectFormat | JsonSchemaFormat | None) -> dict[str, Any] | None:
    """The format of a chat that a text's format is."""
    match form:
        case JsonObjectFormat():
            return {"type": "json_object"}
        case JsonSchemaFormat():
            described = {name: getattr(form, name) for name in form.__struct_fields__}
            read_named_schema(described, _FORMAT, "text")
            return {"type": "json_schema", "json_schema": described}
    return None


def _check_options(body: ResponseBody) -> None:
    """Refuse what the options ask for.

    Raises:
        APIError: an option is not supported.
    """
    for each in body.include or ():
        if each not in _INCLUDABLE:
            raise _not_supported("include", each, _INCLUDABLE)
    text = body.text or TextOptions()
    if text.verbosity not in (None, "medium"):
        raise _not_supported("text.verbosity", text.verbosity, ("medium",))
    for name, value in (body.reasoning or {}).items():
        if value is not None:
            raise _not_supported(f"reasoning.{name[:80]}", value, ())


def _not_supported(place: str, value: Any, allowed: Sequence[Any]) -> APIError:
    expected = " or ".join(["no value", *map(repr, allowed)])
    message = f"{place} = {shown(value)} is not supported: expected {expected}."
    return APIError(400, message, param=place.partition(".")[0], code="unsupported_value")
