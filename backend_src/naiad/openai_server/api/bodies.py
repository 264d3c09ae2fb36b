"""The bodies of requests as types, and how JSON becomes them.

A field is served if its type has it. `OtherFields` lists the other fields that clients send: those that
change no answer here, and those that would, which are refused unless their value asks for nothing.
`ACCEPTED` and `REFUSED` are those of completions and chats.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec
from msgspec import Meta

from naiad.frontend.field import shown
from naiad.frontend.limits import MAX_TIMEOUT_US
from naiad.openai_server.api.content_parts import pass_over_part_keys
from naiad.openai_server.api.errors import APIError
from naiad.openai_server.api.lenient_schemas import pass_over_keywords
from naiad.tokenization import MAX_LEVELS, is_too_deep

# Stands for every value.
ANY = object()
# Fields that change no answer here, with the values that they may have besides null.
ACCEPTED: Mapping[str, tuple[Any, ...]] = {
    "user": (ANY,),
    "metadata": (ANY,),
    "safety_identifier": (ANY,),
    "prompt_cache_key": (ANY,),
    "prompt_cache_retention": (ANY,),
    "session_id": (ANY,),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "modalities": (["text"],),
    "stream_interval": (1,),
}
# Fields that would change the answer, with the values that ask for nothing besides null.
REFUSED: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "detokenize": (True,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_decoding_backend": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "kv_transfer_params": (),
    "length_penalty": (1, 0),
    "logit_bias_file": (),
    "logprob_token_ids": ([],),
    "mm_processor_kwargs": (),
    # SGLang's, as are the next ones with a value: vllm-router and sglang-router send it with every request.
    "no_stop_trim": (False,),
    "prediction": (),
    "prompt_embeds": (),
    "reasoning_effort": (),
    "repetition_detection": (),
    "return_hidden_states": (False,),
    "separate_reasoning": (True,),
    "stream_reasoning": (True,),
    "suffix": ("",),
    "thinking_token_budget": (),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "vllm_xargs": ({},),
    "web_search_options": (),
}
_MAX_UNKNOWN_SHOWN = 80
_PLACE = re.compile(r" - at `(?:key in )?\$\.?(.*?)`$")
_TOP = re.compile(r"[^.\[]*")

Prompt = str | list[str | int | list[int]]


@dataclass(frozen=True, slots=True)
class OtherFields:
    """The fields that clients send and no type has: name → the values that they may have besides null.

    Attributes:
        accepted: those that change no answer here.
        refused: those that would change it.
    """

    accepted: Mapping[str, tuple[Any, ...]]
    refused: Mapping[str, tuple[Any, ...]]


class RequestBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of any request."""

    others: ClassVar[OtherFields] = OtherFields(ACCEPTED, REFUSED)


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What a stream holds besides the chunks of the answer."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class SamplingBody(RequestBody, kw_only=True):
    """The fields that all requests for text have in common; None is the default."""

    model: str
    stream: bool | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    top_n_sigma: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    num_draft_tokens: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    timeout_s: Annotated[float, Meta(gt=0, le=MAX_TIMEOUT_US / 1e6)] | None = None
    # Every chunk of a stream repeats it.
    request_id: Annotated[str, Meta(max_length=200)] | None = None


class GenerationBody(SamplingBody, kw_only=True):
    """The fields that completions and chats have in common."""

    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    prompt_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None


class CompletionBody(GenerationBody, kw_only=True):
    """The body of `POST /v1/completions`."""

    prompt: Prompt
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None


class ChatBody(GenerationBody, kw_only=True):
    """The body of `POST /v1/chat/completions`."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    include_reasoning: bool | None = None


class TokenizeBody(RequestBody, kw_only=True):
    """The body of `POST /tokenize`: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(RequestBody, kw_only=True):
    """The body of `POST /detokenize`."""

    model: str | None = None
    tokens: list[int]


Body = TypeVar("Body", bound=RequestBody)


def parse_body(raw: bytes | bytearray, kind: type[Body], *, is_lenient: bool) -> tuple[Body, list[str]]:
    """Read a body.

    Args:
        raw: JSON.
        kind: its type.
        is_lenient: pass over fields that neither the type has nor its lists of other fields, keywords of
            JSON schemas that JSON Schema does not have, and unknown keys of a chat's content parts.

    Returns:
        The body, and the names of the fields and keywords that were passed over.

    Raises:
        APIError: the body is not JSON, or not of this type, or a field is unknown, not supported or nested
            too deep.
    """
    try:
        sent = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise APIError(400, f"The body is not JSON: {error}") from None
    if not isinstance(sent, dict):
        raise APIError(400, "The body is not a JSON object.")
    served = {name: value for name, value in sent.items() if name in kind.__struct_fields__}
    if raw.count(b"[") + raw.count(b"{") > MAX_LEVELS:
        _check_levels(served)
    passed_over = []
    for name, value in sent.items():
        if name not in served and not _asks_for_nothing(kind.others, name, value):
            if not is_lenient:
                message = f"{name[:_MAX_UNKNOWN_SHOWN]}: this field is not known: do not send it."
                raise APIError(400, message, param=name[:_MAX_UNKNOWN_SHOWN], code="unknown_parameter")
            passed_over.append(name)
    if is_lenient:
        passed_over += pass_over_keywords(served)
        if issubclass(kind, ChatBody | TokenizeBody):
            passed_over += pass_over_part_keys(served.get("messages"))
    try:
        return msgspec.convert(served, kind), passed_over
    except msgspec.ValidationError as error:
        raise _type_error(str(error), sent) from None


def _check_levels(fields: Mapping[str, Any]) -> None:
    for name, value in fields.items():
        if is_too_deep(value):
            message = f"{name} is nested too deep: expected at most {MAX_LEVELS} levels."
            raise APIError(400, message, param=name)


def _asks_for_nothing(others: OtherFields, name: str, value: Any) -> bool:
    """Return whether a field that no type has can be passed over; False if it is unknown.

    Raises:
        APIError: its value is not supported.
    """
    allowed = others.accepted.get(name, others.refused.get(name))
    if allowed is None:
        return False
    if value is None or ANY in allowed or any(_is_same(value, each) for each in allowed):
        return True
    expected = " or ".join(["no value", *(repr(each) for each in allowed)])
    message = f"{name} = {shown(value)} is not supported: expected {expected}."
    raise APIError(400, message, param=name, code="unsupported_value")


def _is_same(value: Any, allowed: Any) -> bool:
    """Whether two values are the same in JSON, where 1 is 1.0 and not true."""
    return value == allowed and isinstance(value, bool) == isinstance(allowed, bool)


def _type_error(message: str, sent: Mapping[str, Any]) -> APIError:
    """Word an error of msgspec so that it begins with the field and its value."""
    place = _PLACE.search(message)
    reason = message[: place.start()] if place else message
    reason = reason[:1].lower() + reason[1:]
    path = place[1] if place else ""
    top = _TOP.match(path)
    param = top[0] if top else ""
    if not param:
        missing = re.search(r"missing required field `(\w+)`", reason)
        param = missing[1] if missing else ""
        return APIError(400, f"The body is not valid: {reason}.", param=param or None)
    return APIError(400, f"{path} = {shown(sent.get(param))}: {reason}.", param=param)
