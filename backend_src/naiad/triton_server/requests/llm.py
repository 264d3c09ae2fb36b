"""From `llm`'s input tensors to rows for the engine, or to one clear error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from naiad.errors import InvalidRequestError
from naiad.frontend.limits import MAX_LOGITS_BYTES, MAX_TIMEOUT_US, ModelLimits
from naiad.frontend.request import GenerateRequest, RequestedOutputs, StopRequest
from naiad.triton_server.requests.fields import (
    ALIASES,
    SERVED,
    WITHOUT_EFFECT,
    Scalar,
    read_scalars,
    refuse_unknown_parameters,
    refuse_unserved,
    required,
    split_rows,
)
from naiad.triton_server.requests.row import read_row
from naiad.triton_server.requests.source import Array, RequestSource

# What each model of the ensemble reads; a parameter reaches all of its steps.
TEXT_PARAMETERS = frozenset({"text_input", "messages", "stop_words", "bad_words"})
KNOWN_PARAMETERS = (
    frozenset(field.name for field in (*SERVED, *WITHOUT_EFFECT))
    | TEXT_PARAMETERS
    | {"cache_salt"}
    | ALIASES.keys()
)

# Fields of the whole request: its rows must agree on them.
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
    outputs = read_requested_outputs(common)
    if not limits.is_decoupled:
        _check_has_one_response(bool(common["stream"]), len(by_row), outputs)
    rows = [
        read_row(row, values, parameters, limits, outputs)
        for row, values in zip(by_row, scalars, strict=True)
    ]
    lengths = [(len(row.prompt_token_ids), row.params.max_tokens) for row in rows]
    check_logits_size(outputs, lengths, limits.vocab_size, is_streaming=bool(common["stream"]))
    exclude_input = common["exclude_input_in_output"]
    return GenerateRequest(
        request_id=source.request_id,
        rows=rows,
        timeout_s=_timeout_s(source.timeout_us, parameters),
        streaming=bool(common["stream"]),
        exclude_input=limits.exclude_input_in_output if exclude_input is None else bool(exclude_input),
        outputs=outputs,
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


def _check_has_one_response(is_streaming: bool, num_rows: int, outputs: RequestedOutputs) -> None:
    if is_streaming:
        raise InvalidRequestError("Streaming is only supported in decoupled mode.")
    num_responses = num_rows * (1 if outputs.beam_width > 1 else outputs.num_return_sequences)
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


_BYTES_PER_LOGIT = 4


def read_requested_outputs(scalars: Mapping[str, Scalar | None]) -> RequestedOutputs:
    """The outputs of checked scalars; what was not sent is None or absent."""
    beam_width = int(scalars.get("beam_width") or 1)
    return RequestedOutputs(
        finish_reason=bool(scalars.get("return_finish_reason")),
        num_input_tokens=bool(scalars.get("return_num_input_tokens")),
        num_output_tokens=bool(scalars.get("return_num_output_tokens")),
        num_cached_tokens=bool(scalars.get("return_num_cached_tokens")),
        log_probs=bool(scalars.get("return_log_probs")),
        num_log_probs=int(scalars.get("num_log_probs") or 0),
        context_logits=bool(scalars.get("return_context_logits")),
        generation_logits=bool(scalars.get("return_generation_logits")),
        perf_metrics=bool(scalars.get("return_perf_metrics")),
        num_return_sequences=int(scalars.get("num_return_sequences") or beam_width),
        beam_width=beam_width,
    )


def check_logits_size(
    outputs: RequestedOutputs, lengths: Sequence[tuple[int, int]], vocab_size: int, *, is_streaming: bool
) -> None:
    """Refuse a request whose logits would be too many.

    Args:
        outputs: what it wants.
        lengths: of each row the prompt's tokens and the new ones at most.
        vocab_size: logits of one position.
        is_streaming: whether its answer comes in several responses.

    Raises:
        InvalidRequestError: names the bytes that it would take.
    """
    num_positions = 0
    if outputs.context_logits:
        num_times = 2 if is_streaming else 1  # with the first response and with the last
        num_positions += num_times * sum(num_prompt_tokens for num_prompt_tokens, _ in lengths)
    if outputs.generation_logits:
        num_positions += outputs.num_return_sequences * sum(max_tokens for _, max_tokens in lengths)
    num_bytes = num_positions * vocab_size * _BYTES_PER_LOGIT
    if num_bytes > MAX_LOGITS_BYTES:
        raise InvalidRequestError(
            f"return_context_logits and return_generation_logits ask for {num_bytes} bytes "
            f"({num_positions} positions of {vocab_size} logits): at most {MAX_LOGITS_BYTES} are allowed"
        )
