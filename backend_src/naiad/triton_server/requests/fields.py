"""Every field a request may carry: what is allowed, what is refused. One validator for all.

A field arrives as a tensor or as a request parameter; a tensor wins. Nothing is ignored: an unknown
parameter is refused, and so is a field of `NOT_SERVED`, unless it holds the value that means "off".
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from naiad.errors import InvalidRequestError
from naiad.frontend.limits import (
    MAX_DIVERSITY_RATE,
    MAX_LENGTH_PENALTY,
    MAX_LOG_PROBS,
    MAX_PRIORITY,
    MAX_RETURN_SEQUENCES,
)
from naiad.triton_server.requests.source import Array

INT32_MAX = 2**31 - 1
UINT64_MAX = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Field:
    """A scalar field that is served.

    Attributes:
        name: as clients know it at the text level; also the parameter's name.
        kind: int, float or bool.
        minimum, maximum: inclusive bounds (ints and floats).
        tensor: the name of llm's tensor when it differs.
    """

    name: str
    kind: type[int] | type[float] | type[bool]
    minimum: float = -math.inf
    maximum: float = math.inf
    tensor: str = ""


SERVED = (
    Field("max_tokens", int, 1, INT32_MAX, "request_output_len"),
    Field("stream", bool, tensor="streaming"),
    Field("end_id", int, -1, INT32_MAX),
    Field("pad_id", int, -1, INT32_MAX),
    Field("temperature", float, 0),
    Field("top_k", int, 0, INT32_MAX, "runtime_top_k"),
    Field("top_p", float, maximum=1, tensor="runtime_top_p"),
    Field("top_p_decay", float, 1e-6, 1, "runtime_top_p_decay"),
    Field("top_p_min", float, 0, 1, "runtime_top_p_min"),
    Field("top_p_reset_ids", int, -1, INT32_MAX, "runtime_top_p_reset_ids"),
    Field("min_p", float, 0, 1),
    Field("seed", int, 0, UINT64_MAX),
    Field("repetition_penalty", float, 0.01, 100),
    Field("presence_penalty", float, -100, 100),
    Field("frequency_penalty", float, -100, 100),
    Field("min_tokens", int, 0, INT32_MAX),
    Field("min_length", int, 0, INT32_MAX),
    Field("random_seed", int, 0, UINT64_MAX),
    Field("ignore_eos", bool),
    Field("priority", int, -MAX_PRIORITY, MAX_PRIORITY),
    Field("num_return_sequences", int, 1, MAX_RETURN_SEQUENCES),
    Field("beam_width", int, 1, MAX_RETURN_SEQUENCES),
    Field("length_penalty", float, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY, "len_penalty"),
    Field("early_stopping", bool),
    Field("beam_search_diversity_rate", float, 0, MAX_DIVERSITY_RATE),
    Field("include_stop_str_in_output", bool),
    Field("exclude_input_in_output", bool),
    Field("return_finish_reason", bool),
    Field("return_num_input_tokens", bool),
    Field("return_num_output_tokens", bool),
    Field("return_num_cached_tokens", bool),
    Field("return_log_probs", bool),
    Field("num_log_probs", int, 0, MAX_LOG_PROBS),
    Field("return_context_logits", bool),
    Field("return_generation_logits", bool),
    Field("return_perf_metrics", bool),
    Field("num_draft_tokens", int, 0, INT32_MAX),
    Field("stop", bool),
)

# Parameters by which the reference's client says a field once more → the field's name.
ALIASES = {"Streaming": "stream"}
# Parameters that benchmarks send and the reference leaves alone: what a stream holds is the model's own.
WITHOUT_EFFECT = (Field("accumulate_tokens", bool),)
_SERVERS_OWN_PARAMETERS = re.compile(r"id|timeout|sequence_\w+|triton_\w+|binary_data_output")

T = TypeVar("T")
Scalar = int | float | bool


def read_scalars(tensors: Mapping[str, Array], parameters: Mapping[str, Any]) -> dict[str, Scalar]:
    """The served scalar fields that were sent for one row, checked.

    Args:
        tensors: llm's input tensors by name, one row of each.
        parameters: the request's parameters.

    Returns:
        Field name → value; a field that was not sent is absent.

    Raises:
        InvalidRequestError: names field, value and what is allowed.
    """
    values: dict[str, Scalar] = {}
    for alias, name in ALIASES.items():
        if alias in parameters:
            parameters = {name: parameters[alias], **parameters}
    for field in SERVED:
        tensor = tensors.get(field.tensor or field.name)
        if tensor is not None:
            values[field.name] = _checked(field, _only_value(field.name, tensor))
        elif field.name in parameters:
            values[field.name] = _checked(field, parameters[field.name])
    for field in WITHOUT_EFFECT:
        if field.name in parameters:
            _checked(field, parameters[field.name])
    return values


def read_string(name: str, tensor: Array | None, parameters: Mapping[str, Any], max_bytes: int) -> str:
    """A string field of one row.

    Args:
        name: tensor and parameter are called so.
        tensor: one value, or None when it was not sent.
        parameters: the request's parameters.
        max_bytes: of its UTF-8 form.

    Returns:
        "" when it was not sent.

    Raises:
        InvalidRequestError: no string, no valid UTF-8, or too long.
    """
    value = parameters.get(name, "") if tensor is None else decoded(name, _only_value(name, tensor))
    if not isinstance(value, str):
        raise InvalidRequestError(f"{name} = {_shown(value)}: expected a string")
    num_bytes = num_utf8_bytes(name, value)
    if num_bytes > max_bytes:
        raise InvalidRequestError(f"{name} has {num_bytes} bytes: at most {max_bytes} are allowed")
    return value


def num_utf8_bytes(name: str, text: str) -> int:
    """The length of a text in bytes.

    Raises:
        InvalidRequestError: it is no valid Unicode (a parameter may hold half a surrogate pair).
    """
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        raise InvalidRequestError(f"{name} holds half a surrogate pair: expected valid Unicode") from None


def decoded(name: str, raw: bytes) -> str:
    """The text of a string tensor's value.

    Raises:
        InvalidRequestError: it is not valid UTF-8.
    """
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"{name} is not valid UTF-8 (byte {error.start})") from None


def required(sent: Mapping[str, T], name: str) -> T:
    """A field that must be there: the server's core lets requests without it through.

    Raises:
        InvalidRequestError: it was not sent.
    """
    if name not in sent:
        raise InvalidRequestError(f"{name} is missing: it is required")
    return sent[name]


def refuse_unknown_parameters(parameters: Mapping[str, Any], known: frozenset[str], forwarded: str) -> None:
    """Refuse parameters nobody would read.

    Args:
        parameters: the request's parameters.
        known: names that the model reads.
        forwarded: regular expression of header names that the server forwards; "" = none.

    Raises:
        InvalidRequestError: names the parameter.
    """
    for name in parameters:
        if name in known or name in NOT_SERVED or _SERVERS_OWN_PARAMETERS.fullmatch(name):
            continue
        if forwarded and re.fullmatch(forwarded, name):
            continue
        raise InvalidRequestError(
            f"unknown parameter {name[:80]!r}: allowed are {', '.join(sorted(known))}, id, timeout"
        )


def split_rows(tensors: Mapping[str, Array], num_rows: int) -> list[dict[str, Array]]:
    """Each row's part of the tensors [B, …], as tensors [1, …]."""
    return [{name: tensor[row : row + 1] for name, tensor in tensors.items()} for row in range(num_rows)]


def _only_value(name: str, tensor: Array) -> Any:
    if tensor.size != 1:
        raise InvalidRequestError(f"{name} has {tensor.size} values a row: expected one")
    return tensor.item()


def _checked(field: Field, value: Any) -> Scalar:
    if field.kind is bool:
        if isinstance(value, bool):
            return value
        raise InvalidRequestError(f"{field.name} = {_shown(value)}: expected true or false")
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidRequestError(f"{field.name} = {_shown(value)}: expected a number")
    if field.kind is int and not isinstance(value, int):
        raise InvalidRequestError(f"{field.name} = {_shown(value)}: expected a whole number")
    value = _bound_meant(field, value)
    if not field.minimum <= value <= field.maximum or not math.isfinite(value):
        raise InvalidRequestError(f"{field.name} = {_shown(value)}: expected {_bounds(field)}")
    return field.kind(value)


def _bound_meant(field: Field, value: float) -> float:
    """The bound, for its nearest float32: an FP32 tensor can not hold it better."""
    for bound in (field.minimum, field.maximum):
        if field.kind is float and value == float(np.float32(bound)):
            return bound
    return value


def _bounds(field: Field) -> str:
    low = "" if field.minimum == -math.inf else f" ≥ {field.minimum}"
    high = "" if field.maximum == math.inf else f" ≤ {field.maximum}"
    return "a finite number" + " and".join(part for part in (low, high) if part)


def _shown(value: Any) -> str:
    return repr(value)[:80]


# Names of reference and A2 fields that are declared but not served, with the values that switch
# them off. An empty tensor, or one of empty strings, is always "off".
NOT_SERVED: Mapping[str, tuple[float, ...]] = {
    "decoder_input_ids": (),
    "decoder_input_lengths": (0, 1),
    "encoder_input_features": (),
    "encoder_output_lengths": (),
    "draft_logits": (),
    "draft_acceptance_threshold": (),
    "lookahead_window_size": (),
    "lookahead_ngram_size": (),
    "lookahead_verification_set_size": (),
    "prompt_embedding_table": (),
    "prompt_table_extra_ids": (),
    "prompt_table_extra_id": (),
    "prompt_vocab_size": (0,),
    "cross_attention_mask": (),
    "mrope_rotary_cos_sin": (),
    "mrope_position_deltas": (),
    "skip_cross_attn_blocks": (),
    "lora_task_id": (0,),
    "lora_weights": (),
    "lora_config": (),
    "context_phase_params": (),
    "guided_decoding_guide_type": (),
    "guided_decoding_guide": (),
    "decoder_text_input": (),
    "image_input": (),
    "image_bytes_input": (),
    "image_url_input": (),
    "video_bytes_input": (),
    "use_draft_logits": (0,),
}
# The reference's tokenizer makes one of these for every prompt, and clients hand it on: for models
# without an encoder it says nothing.
_ONE_IS_OFF = ("decoder_input_ids",)


def refuse_unserved(sent: Mapping[str, Any]) -> None:
    """Refuse each field of `NOT_SERVED` that asks for something.

    Args:
        sent: tensors (arrays) or parameters (plain values) by name.

    Raises:
        InvalidRequestError: names the field.
    """
    for name, value in sent.items():
        if name in _ONE_IS_OFF and np.shape(value)[1:] == (1,):
            continue
        if name in NOT_SERVED and not _is_off(value, NOT_SERVED[name]):
            raise InvalidRequestError(f"{name} is not supported by this version of Naiad: do not send it")


def _is_off(value: Any, off_values: tuple[float, ...]) -> bool:
    flat = np.asarray(value).reshape(-1)
    if flat.dtype.kind in "OSU":
        return all(item in (b"", "") for item in flat.tolist())
    return all(item in off_values for item in flat.tolist())
