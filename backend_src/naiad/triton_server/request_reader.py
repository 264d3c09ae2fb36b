"""From `llm`'s input tensors to rows for the engine, or to one clear error."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import numpy as np

from naiad.errors import InvalidRequestError
from naiad.sequence import SamplingParams, TextContext
from naiad.tokenization import unpack_word_list
from naiad.triton_server.request_fields import (
    SERVED,
    Array,
    Scalar,
    read_scalars,
    refuse_unknown_parameters,
    refuse_unserved,
    required,
    split_rows,
)

MAX_STOP_WORDS = 64
MAX_STOP_WORD_TOKENS = 256
MAX_STOP_TOKEN_IDS = 64

# What each model of the ensemble reads; a parameter reaches all of its steps.
TEXT_PARAMETERS = frozenset({"text_input", "messages", "stop_words"})
KNOWN_PARAMETERS = frozenset(field.name for field in SERVED) | TEXT_PARAMETERS

# What a client can only wish for the request, not for a row of it.
_OF_THE_WHOLE_REQUEST = (
    "stop",
    "stream",
    "exclude_input_in_output",
    "return_finish_reason",
    "return_num_input_tokens",
    "return_num_output_tokens",
    "return_num_cached_tokens",
)

_text_context_decoder = msgspec.json.Decoder(TextContext)


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


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What the engine serves, and this model's defaults."""

    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    exclude_input_in_output: bool
    forwarded_headers: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRow:
    """One row of the batch: the prompt and, when a detokenizer follows, its text context."""

    prompt_token_ids: list[int]
    params: SamplingParams
    text: TextContext | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """A whole request: its rows, and what the client wants to see of them."""

    request_id: str
    rows: list[RequestRow]
    timeout_s: float | None
    streaming: bool
    exclude_input: bool
    return_finish_reason: bool
    return_num_input_tokens: bool
    return_num_output_tokens: bool
    return_num_cached_tokens: bool


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
    by_row = split_rows(tensors, required(tensors, "input_lengths").shape[0])
    scalars = [read_scalars(row, parameters) for row in by_row]
    wishes = {name: _same_in_all_rows(name, scalars) for name in _OF_THE_WHOLE_REQUEST}
    if wishes["stop"]:
        if not source.request_id:
            raise InvalidRequestError("A request id must be provided for request cancellation")
        return StopRequest(source.request_id)
    exclude_input = wishes["exclude_input_in_output"]
    return GenerateRequest(
        request_id=source.request_id,
        rows=[_read_row(row, values, limits) for row, values in zip(by_row, scalars, strict=True)],
        timeout_s=_timeout_s(source.timeout_us, parameters),
        streaming=bool(wishes["stream"]),
        exclude_input=limits.exclude_input_in_output if exclude_input is None else bool(exclude_input),
        return_finish_reason=bool(wishes["return_finish_reason"]),
        return_num_input_tokens=bool(wishes["return_num_input_tokens"]),
        return_num_output_tokens=bool(wishes["return_num_output_tokens"]),
        return_num_cached_tokens=bool(wishes["return_num_cached_tokens"]),
    )


def _same_in_all_rows(name: str, scalars: list[dict[str, Scalar]]) -> Scalar | None:
    values = {row.get(name) for row in scalars}
    if len(values) > 1:
        raise InvalidRequestError(
            f"{name} differs between the rows of the request: expected one value for all"
        )
    return values.pop()


def _read_row(tensors: Mapping[str, Array], scalars: Mapping[str, Scalar], limits: ModelLimits) -> RequestRow:
    prompt = _read_prompt(tensors, limits)
    text = _read_text_context(tensors.get("text_context"))
    params = _sampling_params(
        scalars,
        len(prompt),
        limits,
        stop_ids=_read_stop_token_ids(tensors.get("stop_token_ids"), scalars, limits),
        # Where a detokenizer follows, stop words are matched on text.
        stop_sequences=() if text else _read_stop_sequences(tensors.get("stop_words_list")),
    )
    return RequestRow(prompt_token_ids=prompt, text=text, params=params)


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
    _check_token_ids("input_ids", ids, limits.vocab_size)
    return ids.tolist()  # type: ignore[no-any-return]


def _check_token_ids(name: str, ids: Array, vocab_size: int) -> None:
    bad = ids[(ids < 0) | (ids >= vocab_size)]
    if bad.size:
        raise InvalidRequestError(f"{name} holds {int(bad[0])}: expected token ids in [0, {vocab_size})")


def _read_text_context(tensor: Array | None) -> TextContext | None:
    if tensor is None:
        return None
    try:
        return _text_context_decoder.decode(tensor.item())
    except (msgspec.ValidationError, msgspec.DecodeError, TypeError, ValueError):
        raise InvalidRequestError("text_context is not what Naiad's tokenizer model writes") from None


def _read_stop_sequences(tensor: Array | None) -> tuple[tuple[int, ...], ...]:
    if tensor is None:
        return ()
    words = unpack_word_list(np.ascontiguousarray(tensor.reshape(2, -1)))
    if len(words) > MAX_STOP_WORDS:
        raise InvalidRequestError(
            f"stop_words_list has {len(words)} words: at most {MAX_STOP_WORDS} are allowed"
        )
    longest = max(map(len, words), default=0)
    if longest > MAX_STOP_WORD_TOKENS:
        raise InvalidRequestError(
            f"stop_words_list has a word of {longest} tokens: at most {MAX_STOP_WORD_TOKENS} are allowed"
        )
    return tuple(tuple(word) for word in words)


def _read_stop_token_ids(
    tensor: Array | None, scalars: Mapping[str, Scalar], limits: ModelLimits
) -> tuple[int, ...]:
    end_id = int(scalars.get("end_id", -1))
    if end_id >= limits.vocab_size:
        raise InvalidRequestError(
            f"end_id = {end_id}: expected -1 (none) or an id in [0, {limits.vocab_size})"
        )
    ids: list[int] = []
    if not scalars.get("ignore_eos"):
        ids = [*limits.eos_token_ids, *([end_id] if end_id >= 0 else [])]
    if tensor is not None:
        if tensor.size > MAX_STOP_TOKEN_IDS:
            raise InvalidRequestError(
                f"stop_token_ids has {tensor.size} ids: at most {MAX_STOP_TOKEN_IDS} are allowed"
            )
        _check_token_ids("stop_token_ids", tensor, limits.vocab_size)
        ids += tensor.reshape(-1).tolist()
    return tuple(dict.fromkeys(ids))


def _sampling_params(
    scalars: Mapping[str, Scalar],
    num_prompt_tokens: int,
    limits: ModelLimits,
    *,
    stop_ids: tuple[int, ...],
    stop_sequences: tuple[tuple[int, ...], ...],
) -> SamplingParams:
    wanted = int(required(scalars, "max_tokens"))
    max_tokens = min(wanted, limits.max_model_len - num_prompt_tokens)
    min_tokens = int(scalars.get("min_tokens", scalars.get("min_length", 0)))
    if min_tokens > wanted:
        raise InvalidRequestError(f"min_tokens = {min_tokens}: expected at most max_tokens = {wanted}")
    top_k = min(int(scalars.get("top_k", 0)), limits.vocab_size)
    top_p = float(scalars.get("top_p", 0.0))
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=_temperature(scalars, top_k),
        top_k=top_k,
        top_p=top_p if top_p > 0 else 1.0,
        seed=int(scalars["seed"]) if "seed" in scalars else secrets.randbits(64),
        repetition_penalty=float(scalars.get("repetition_penalty", 1.0)),
        presence_penalty=float(scalars.get("presence_penalty", 0.0)),
        frequency_penalty=float(scalars.get("frequency_penalty", 0.0)),
        min_tokens=min(min_tokens, max_tokens),
        stop_token_ids=stop_ids,
        stop_sequences=stop_sequences,
        priority=int(scalars.get("priority", 0)),
    )


def _temperature(scalars: Mapping[str, Scalar], top_k: int) -> float:
    """The reference's rule: without any filter a temperature that is absent or 1.0 means greedy.

    A top_p that was sent as 1.0 samples (Triton's OpenAI frontend sends it).
    """
    temperature = float(scalars.get("temperature", 1.0))
    filters = top_k > 0 or float(scalars.get("top_p", 0.0)) > 0
    if top_k == 1 or (temperature == 1.0 and not filters):
        return 0.0
    return temperature


def _timeout_s(timeout_us: int, parameters: Mapping[str, Any]) -> float | None:
    """The deadline: Triton's own field (gRPC), or the parameter (HTTP generate)."""
    value = timeout_us or parameters.get("timeout", 0)
    try:
        microseconds = int(value)
    except (TypeError, ValueError):
        raise InvalidRequestError(f"timeout = {str(value)[:40]!r}: expected µs, a whole number") from None
    if microseconds < 0:
        raise InvalidRequestError(f"timeout = {microseconds}: expected µs ≥ 0 (0 = none)")
    return microseconds / 1e6 if microseconds else None
