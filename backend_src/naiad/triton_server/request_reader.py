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
)

PROBE_REQUEST_ID = "naiad-probe"
MAX_STOP_WORDS = 64
MAX_STOP_WORD_TOKENS = 256
MAX_STOP_TOKEN_IDS = 64

# What each model of the ensemble reads; a parameter reaches all of its steps.
TEXT_PARAMETERS = frozenset({"text_input", "messages", "stop_words"})
KNOWN_PARAMETERS = frozenset(field.name for field in SERVED) | TEXT_PARAMETERS

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
    scalars = read_scalars(tensors, parameters)
    if scalars.get("stop"):
        if not source.request_id:
            raise InvalidRequestError("A request id must be provided for request cancellation")
        return StopRequest(source.request_id)
    prompts = _read_prompts(tensors, limits)
    texts = _read_text_contexts(tensors.get("text_context"), len(prompts))
    stop_sequences = _read_stop_sequences(tensors.get("stop_words_list"), len(prompts))
    stop_ids = _read_stop_token_ids(tensors.get("stop_token_ids"), len(prompts), scalars, limits)
    rows = [
        RequestRow(
            prompt_token_ids=prompt,
            text=text,
            params=_sampling_params(
                scalars, len(prompt), limits, stop_ids=ids, stop_sequences=() if text else sequences
            ),
        )
        for prompt, text, sequences, ids in zip(prompts, texts, stop_sequences, stop_ids, strict=True)
    ]
    return GenerateRequest(
        request_id=source.request_id,
        rows=rows,
        timeout_s=_timeout_s(source.timeout_us, parameters),
        streaming=bool(scalars.get("stream", False)),
        exclude_input=bool(scalars.get("exclude_input_in_output", limits.exclude_input_in_output)),
        return_finish_reason=bool(scalars.get("return_finish_reason", False)),
        return_num_input_tokens=bool(scalars.get("return_num_input_tokens", False)),
        return_num_output_tokens=bool(scalars.get("return_num_output_tokens", False)),
        return_num_cached_tokens=bool(scalars.get("return_num_cached_tokens", False)),
    )


def _read_prompts(tensors: Mapping[str, Array], limits: ModelLimits) -> list[list[int]]:
    input_ids = tensors.get("input_ids")
    if input_ids is None:
        raise InvalidRequestError("input_ids is missing: expected the prompt's token ids")
    lengths = tensors["input_lengths"].reshape(-1).tolist()
    table = input_ids.reshape(input_ids.shape[0], -1)
    if len(lengths) != len(table):
        raise InvalidRequestError(
            f"input_lengths has {len(lengths)} values for {len(table)} rows of input_ids"
        )
    return [_checked_prompt(row, length, limits) for row, length in zip(table, lengths, strict=True)]


def _checked_prompt(row: Array, length: int, limits: ModelLimits) -> list[int]:
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


def _read_text_contexts(tensor: Array | None, num_rows: int) -> list[TextContext | None]:
    if tensor is None:
        return [None] * num_rows
    try:
        texts = [_text_context_decoder.decode(raw) for raw in tensor.reshape(-1).tolist()]
    except (msgspec.ValidationError, msgspec.DecodeError, TypeError):
        raise InvalidRequestError("text_context is not what Naiad's tokenizer model writes") from None
    if len(texts) != num_rows:
        raise InvalidRequestError(f"text_context has {len(texts)} values for {num_rows} rows")
    return [*texts]


def _read_stop_sequences(tensor: Array | None, num_rows: int) -> list[tuple[tuple[int, ...], ...]]:
    if tensor is None:
        return [()] * num_rows
    packed = tensor.reshape(num_rows, 2, -1)
    rows = []
    for row in packed:
        words = unpack_word_list(np.ascontiguousarray(row))
        if len(words) > MAX_STOP_WORDS:
            raise InvalidRequestError(
                f"stop_words_list has {len(words)} words: at most {MAX_STOP_WORDS} are allowed"
            )
        longest = max(map(len, words), default=0)
        if longest > MAX_STOP_WORD_TOKENS:
            raise InvalidRequestError(
                f"stop_words_list has a word of {longest} tokens: at most {MAX_STOP_WORD_TOKENS} are allowed"
            )
        rows.append(tuple(tuple(word) for word in words))
    return rows


def _read_stop_token_ids(
    tensor: Array | None, num_rows: int, scalars: Mapping[str, Scalar], limits: ModelLimits
) -> list[tuple[int, ...]]:
    end_id = int(scalars.get("end_id", -1))
    if end_id >= limits.vocab_size:
        raise InvalidRequestError(
            f"end_id = {end_id}: expected -1 (none) or an id in [0, {limits.vocab_size})"
        )
    shared: tuple[int, ...] = ()
    if not scalars.get("ignore_eos"):
        shared = limits.eos_token_ids + (() if end_id < 0 else (end_id,))
    if tensor is None:
        return [tuple(dict.fromkeys(shared))] * num_rows
    table = tensor.reshape(num_rows, -1)
    if table.shape[1] > MAX_STOP_TOKEN_IDS:
        raise InvalidRequestError(
            f"stop_token_ids has {table.shape[1]} ids: at most {MAX_STOP_TOKEN_IDS} are allowed"
        )
    _check_token_ids("stop_token_ids", table, limits.vocab_size)
    return [tuple(dict.fromkeys((*shared, *row.tolist()))) for row in table]


def _sampling_params(
    scalars: Mapping[str, Scalar],
    num_prompt_tokens: int,
    limits: ModelLimits,
    *,
    stop_ids: tuple[int, ...],
    stop_sequences: tuple[tuple[int, ...], ...],
) -> SamplingParams:
    wanted = int(scalars["max_tokens"])
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
