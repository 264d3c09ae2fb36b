"""From `llm`'s input tensors to rows for the engine, or to one clear error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from naiad.errors import InvalidRequestError
from naiad.sequence import BeamParams, KVRetention, SamplingParams, TextContext
from naiad.triton_server.beam_fields import read_beam_params, without_drawing
from naiad.triton_server.logit_fields import check_token_ids, read_offered_token_ids
from naiad.triton_server.output_wishes import OutputWishes, check_logits_size, read_wishes
from naiad.triton_server.request_fields import (
    ALIASES,
    SERVED,
    WITHOUT_EFFECT,
    Array,
    Scalar,
    read_scalars,
    read_string,
    refuse_unknown_parameters,
    required,
    split_rows,
)
from naiad.triton_server.request_limits import MAX_CACHE_SALT_BYTES, MAX_TIMEOUT_US, ModelLimits
from naiad.triton_server.retention_fields import read_retention
from naiad.triton_server.sampling_fields import read_sampling_params
from naiad.triton_server.text_context_field import read_text_context
from naiad.triton_server.unserved_fields import refuse_unserved

# What each model of the ensemble reads; a parameter reaches all of its steps.
TEXT_PARAMETERS = frozenset({"text_input", "messages", "stop_words", "bad_words"})
KNOWN_PARAMETERS = (
    frozenset(field.name for field in (*SERVED, *WITHOUT_EFFECT))
    | TEXT_PARAMETERS
    | {"cache_salt"}
    | ALIASES.keys()
)

# What a client can only wish for the request, not for a row of it.
_OF_THE_WHOLE_REQUEST = (
    "stop",
    "stream",
    "exclude_input_in_output",
    "return_finish_reason",
    "return_num_input_tokens",
    "return_num_output_tokens",
    "return_num_cached_tokens",
    "return_log_probs",
    "num_log_probs",
    "return_context_logits",
    "return_generation_logits",
    "return_perf_metrics",
    "num_return_sequences",
    "beam_width",
)


class RequestSource(Protocol):
    """What the reader needs of a Triton request."""

    @property
    def request_id(self) -> str:
        """The client's id; may be empty."""

    @property
    def timeout_us(self) -> int:
        """Triton's `timeout` in µs; 0 = none."""

    def parameters(self) -> Mapping[str, Any]:
        """The request parameters."""

    def tensors(self) -> Mapping[str, Array]:
        """The input tensors by name, batch dimension included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRow:
    """One row of the batch: the prompt, when a detokenizer follows its text context, and its search."""

    prompt_token_ids: list[int]
    params: SamplingParams
    text: TextContext | None
    cache_salt: str
    beam: BeamParams | None = None
    draft_token_ids: tuple[int, ...] = ()
    retention: KVRetention | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """A whole request: its rows, and what the client wants to see of them.

    Attributes:
        joins_sequences: all sequences of a row have one response together, when all have ended.
    """

    request_id: str
    rows: list[RequestRow]
    timeout_s: float | None
    streaming: bool
    exclude_input: bool
    wishes: OutputWishes
    joins_sequences: bool = False


@dataclass(frozen=True, slots=True)
class StopRequest:
    """`stop` = true: cancel every live request of this id."""

    request_id: str


def read_request(source: RequestSource, limits: ModelLimits) -> GenerateRequest | StopRequest:
    """Check everything that was sent and build the rows.

    Raises:
        InvalidRequestError: one bad row refuses the whole request.
    """
    tensors, parameters = source.tensors(), source.parameters()
    refuse_unknown_parameters(parameters, KNOWN_PARAMETERS, limits.forwarded_headers)
    refuse_unserved(tensors)
    refuse_unserved(parameters)
    if asks_to_stop(tensors, parameters):
        return stop_request(source.request_id)
    by_row = split_rows(tensors, required(tensors, "input_lengths").shape[0])
    scalars = [read_scalars(row, parameters) for row in by_row]
    common = {name: _same_in_all_rows(name, scalars) for name in _OF_THE_WHOLE_REQUEST}
    wishes = read_wishes(common)
    if not limits.is_decoupled:
        _check_has_one_response(bool(common["stream"]), len(by_row), wishes)
    rows = [
        _read_row(row, values, parameters, limits, wishes)
        for row, values in zip(by_row, scalars, strict=True)
    ]
    lengths = [(len(row.prompt_token_ids), row.params.max_tokens) for row in rows]
    check_logits_size(wishes, lengths, limits.vocab_size, is_streaming=bool(common["stream"]))
    exclude_input = common["exclude_input_in_output"]
    return GenerateRequest(
        request_id=source.request_id,
        rows=rows,
        timeout_s=_timeout_s(source.timeout_us, parameters),
        streaming=bool(common["stream"]),
        exclude_input=limits.exclude_input_in_output if exclude_input is None else bool(exclude_input),
        wishes=wishes,
    )


def asks_to_stop(tensors: Mapping[str, Array], parameters: Mapping[str, Any]) -> bool:
    """Whether all rows say `stop`. Such a request needs nothing else, and nothing else of it is read."""
    if "stop" in tensors:
        return bool(tensors["stop"].all())
    return parameters.get("stop") is True


def stop_request(request_id: str) -> StopRequest:
    """The order to cancel what has this id.

    Raises:
        InvalidRequestError: there is no id.
    """
    if not request_id:
        raise InvalidRequestError("A request id must be provided for request cancellation")
    return StopRequest(request_id)


def _check_has_one_response(is_streaming: bool, num_rows: int, wishes: OutputWishes) -> None:
    if is_streaming:
        raise InvalidRequestError("Streaming is only supported in decoupled mode.")
    num_responses = num_rows * (1 if wishes.beam_width > 1 else wishes.num_return_sequences)
    if num_responses > 1:
        raise InvalidRequestError(
            f"the request asks for {num_responses} responses, its rows times num_return_sequences: "
            "expected 1, as this model is not decoupled"
        )


def _same_in_all_rows(name: str, scalars: list[dict[str, Scalar]]) -> Scalar | None:
    values = {row.get(name) for row in scalars}
    if len(values) > 1:
        raise InvalidRequestError(
            f"{name} differs between the rows of the request: expected one value for all"
        )
    return values.pop()


def _read_row(
    tensors: Mapping[str, Array],
    scalars: Mapping[str, Scalar],
    parameters: Mapping[str, Any],
    limits: ModelLimits,
    wishes: OutputWishes,
) -> RequestRow:
    prompt = _read_prompt(tensors, limits)
    beam = read_beam_params(scalars)
    text = read_text_context(tensors.get("text_context"), limits.vocab_size)
    if text is not None and scalars.get("include_stop_str_in_output"):
        text = msgspec.structs.replace(text, includes_stop_string=True)
    params = read_sampling_params(
        tensors, scalars, limits, wishes, num_prompt_tokens=len(prompt), has_text=text is not None
    )
    if beam is not None:
        params = without_drawing(params)
    salt = read_string("cache_salt", tensors.get("cache_salt"), parameters, MAX_CACHE_SALT_BYTES)
    drafts = read_offered_token_ids(tensors.get("draft_input_ids"), limits)
    if drafts and beam is not None:
        raise InvalidRequestError(
            f"draft_input_ids has {len(drafts)} ids: expected none with beam_width = {wishes.beam_width}"
        )
    return RequestRow(
        prompt_token_ids=prompt,
        text=text,
        params=params,
        cache_salt=salt,
        beam=beam,
        draft_token_ids=drafts,
        retention=read_retention(tensors),
    )


def _read_prompt(tensors: Mapping[str, Array], limits: ModelLimits) -> list[int]:
    row = required(tensors, "input_ids").reshape(-1)
    length = int(tensors["input_lengths"].item())
    if not 0 <= length <= row.size:
        raise InvalidRequestError(
            f"input_lengths = {length}: expected 1 … {row.size}, the width of input_ids"
        )
    if length == 0:
        raise InvalidRequestError("the prompt is empty: expected at least one token")
    if length >= limits.max_model_len:
        raise InvalidRequestError(
            f"the prompt has {length} tokens: at most {limits.max_model_len - 1} are allowed "
            f"(max_model_len = {limits.max_model_len}, prompt and output together)"
        )
    ids = row[:length]
    check_token_ids("input_ids", ids, limits.vocab_size)
    return ids.tolist()  # type: ignore[no-any-return]


def _timeout_s(timeout_us: int, parameters: Mapping[str, Any]) -> float | None:
    """The deadline: Triton's own field (gRPC), or the parameter (HTTP generate)."""
    value = timeout_us or parameters.get("timeout", 0)
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 20:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_TIMEOUT_US:
        raise InvalidRequestError(
            f"timeout = {repr(value)[:40]}: expected whole µs, 0 (none) … {MAX_TIMEOUT_US}"
        )
    return value / 1e6 if value else None
