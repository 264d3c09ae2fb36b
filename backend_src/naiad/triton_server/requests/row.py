"""One row of a request: its prompt, how it is sampled, when it ends, and what is kept of it."""

from __future__ import annotations

import math
import secrets
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from naiad.errors import InvalidRequestError
from naiad.frontend.limits import (
    MAX_BAD_WORD_SEQUENCES,
    MAX_BAD_WORD_TOKENS,
    MAX_BIAS,
    MAX_BIASED_IDS,
    MAX_CACHE_SALT_BYTES,
    MAX_OFFERED_TOKENS,
    MAX_RETENTION_RANGES,
    MAX_STOP_TOKEN_IDS,
    MAX_STOP_WORD_TOKENS,
    MAX_STOP_WORDS,
    MAX_WORD_BYTES,
    ModelLimits,
)
from naiad.frontend.request import RequestedOutputs, RequestRow
from naiad.sequence import (
    DEFAULT_KV_PRIORITY,
    BeamParams,
    KVRetention,
    SamplingParams,
    TextContext,
    TopPDecay,
)
from naiad.tokenization import unpack_word_list
from naiad.triton_server.requests.fields import INT32_MAX, Scalar, read_string, required
from naiad.triton_server.requests.source import Array


def read_row(
    tensors: Mapping[str, Array],
    scalars: Mapping[str, Scalar],
    parameters: Mapping[str, Any],
    limits: ModelLimits,
    outputs: RequestedOutputs,
) -> RequestRow:
    """Check one row of `llm`'s tensors.

    Args:
        tensors: the row's, each [1, …].
        scalars: its checked scalar fields.
        parameters: of the request.
        limits: of the model.
        outputs: of the request.

    Raises:
        InvalidRequestError: names field, value and what is allowed.
    """
    prompt = _read_prompt(tensors, limits)
    beam = read_beam_params(scalars)
    text = read_text_context(tensors.get("text_context"), limits.vocab_size)
    if text is not None and scalars.get("include_stop_str_in_output"):
        text = msgspec.structs.replace(text, includes_stop_string=True)
    params = read_sampling_params(
        tensors, scalars, limits, outputs, num_prompt_tokens=len(prompt), has_text=text is not None
    )
    if beam is not None:
        params = without_drawing(params)
    salt = read_string("cache_salt", tensors.get("cache_salt"), parameters, MAX_CACHE_SALT_BYTES)
    drafts = read_offered_token_ids(tensors.get("draft_input_ids"), limits)
    if drafts and beam is not None:
        raise InvalidRequestError(
            f"draft_input_ids has {len(drafts)} ids: expected none with beam_width = {outputs.beam_width}"
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


# The reference's own.
DEFAULT_TOP_P_MIN = 1e-6


def read_sampling_params(
    tensors: Mapping[str, Array],
    scalars: Mapping[str, Scalar],
    limits: ModelLimits,
    outputs: RequestedOutputs,
    *,
    num_prompt_tokens: int,
    has_text: bool,
) -> SamplingParams:
    """Everything that decides a row's tokens.

    Args:
        tensors: the row's lists, each [1, …].
        scalars: its checked scalar fields.
        limits: of the model.
        outputs: of the request.
        num_prompt_tokens: at most max_model_len - 1.
        has_text: a detokenizer follows, so stop words are matched on text.

    Raises:
        InvalidRequestError: names field, value and what is allowed.
    """
    return msgspec.structs.replace(
        _read_numbers(scalars, limits, limits.max_model_len - num_prompt_tokens),
        stop_token_ids=_read_stop_token_ids(tensors.get("stop_token_ids"), scalars, limits),
        stop_sequences=() if has_text else _read_stop_sequences(tensors.get("stop_words_list")),
        bad_words=_read_bad_words(tensors.get("bad_words_list"), limits),
        logit_bias=read_logit_bias(tensors, limits),
        allowed_token_ids=read_allowed_token_ids(tensors.get("allowed_token_ids"), limits),
        num_log_probs=outputs.num_engine_log_probs,
        returns_context_logits=outputs.context_logits,
        returns_generation_logits=outputs.generation_logits,
        returns_perf_metrics=outputs.perf_metrics,
    )


def _read_numbers(scalars: Mapping[str, Scalar], limits: ModelLimits, room: int) -> SamplingParams:
    """What the scalar fields say; at most `room` new tokens."""
    max_tokens = int(required(scalars, "max_tokens"))
    top_p = float(scalars.get("top_p", 0.0))
    # The second is the name that the reference had for it until April 2025.
    seed = _either(scalars, "seed", "random_seed")
    return SamplingParams(
        max_tokens=min(max_tokens, room),
        temperature=_temperature(scalars),
        top_k=min(int(scalars.get("top_k", 0)), limits.vocab_size),
        top_p=top_p if top_p > 0 else 1.0,
        top_p_decay=_top_p_decay(scalars, top_p),
        min_p=float(scalars.get("min_p", 0.0)),
        seed=secrets.randbits(64) if seed is None else seed,
        repetition_penalty=float(scalars.get("repetition_penalty", 1.0)),
        presence_penalty=float(scalars.get("presence_penalty", 0.0)),
        frequency_penalty=float(scalars.get("frequency_penalty", 0.0)),
        min_tokens=min(_min_tokens(scalars, max_tokens), room),
        priority=int(scalars.get("priority", 0)),
        num_draft_tokens=int(scalars.get("num_draft_tokens", -1)),
    )


def _top_p_decay(scalars: Mapping[str, Scalar], top_p: float) -> TopPDecay | None:
    """A factor of 1 is none, and then the other two fields say nothing."""
    factor = float(scalars.get("top_p_decay", 1.0))
    if factor == 1:
        return None
    if top_p <= 0:
        raise InvalidRequestError(f"top_p_decay = {factor}: expected top_p > 0 with it, which decays")
    minimum = float(scalars.get("top_p_min", DEFAULT_TOP_P_MIN))
    return TopPDecay(factor, minimum, int(scalars.get("top_p_reset_ids", -1)))


def _either(scalars: Mapping[str, Scalar], name: str, alias: str) -> int | None:
    """A whole number that has two names; None when neither was sent."""
    sent = [int(scalars[each]) for each in (name, alias) if each in scalars]
    if len(set(sent)) > 1:
        raise InvalidRequestError(
            f"{name} = {sent[0]} and {alias} = {sent[1]}: expected one of them, or the same value"
        )
    return sent[0] if sent else None


def _min_tokens(scalars: Mapping[str, Scalar], max_tokens: int) -> int:
    min_tokens = _either(scalars, "min_tokens", "min_length") or 0
    if min_tokens > max_tokens:
        raise InvalidRequestError(f"min_tokens = {min_tokens}: expected at most max_tokens = {max_tokens}")
    return min_tokens


def _temperature(scalars: Mapping[str, Scalar]) -> float:
    """The reference's rule: without any filter a temperature that is absent or 1.0 means greedy.

    A top_p that was sent as 1.0 samples (Triton's OpenAI frontend sends it).
    """
    temperature = float(scalars.get("temperature", 1.0))
    has_filter = any(float(scalars.get(name, 0.0)) > 0 for name in ("top_k", "top_p", "min_p"))
    if scalars.get("top_k") == 1 or (temperature == 1.0 and not has_filter):
        return 0.0
    return temperature


def _read_words(name: str, tensor: Array | None, max_words: int, max_tokens: int) -> list[list[int]]:
    if tensor is None:
        return []
    words = unpack_word_list(np.ascontiguousarray(tensor.reshape(2, -1)))
    if len(words) > max_words:
        raise InvalidRequestError(f"{name} has {len(words)} words: at most {max_words} are allowed")
    longest = max(map(len, words), default=0)
    if longest > max_tokens:
        raise InvalidRequestError(f"{name} has a word of {longest} tokens: at most {max_tokens} are allowed")
    return words


def _read_stop_sequences(tensor: Array | None) -> tuple[tuple[int, ...], ...]:
    words = _read_words("stop_words_list", tensor, MAX_STOP_WORDS, MAX_STOP_WORD_TOKENS)
    return tuple(tuple(word) for word in words)


def _read_bad_words(tensor: Array | None, limits: ModelLimits) -> tuple[tuple[int, ...], ...]:
    words = _read_words("bad_words_list", tensor, MAX_BAD_WORD_SEQUENCES, MAX_BAD_WORD_TOKENS)
    for word in words:
        check_token_ids("bad_words_list", np.array(word), limits.vocab_size)
    return tuple(dict.fromkeys(tuple(word) for word in words))


def _read_stop_token_ids(
    tensor: Array | None, scalars: Mapping[str, Scalar], limits: ModelLimits
) -> tuple[int, ...]:
    ids: list[int] = []
    if not scalars.get("ignore_eos"):
        end_id = int(scalars.get("end_id", -1))
        # An id that the model can not make ends nothing: so benchmarks say "none".
        ids = [*limits.eos_token_ids, *([end_id] if 0 <= end_id < limits.vocab_size else [])]
    if tensor is not None:
        if tensor.size > MAX_STOP_TOKEN_IDS:
            raise InvalidRequestError(
                f"stop_token_ids has {tensor.size} ids: at most {MAX_STOP_TOKEN_IDS} are allowed"
            )
        check_token_ids("stop_token_ids", tensor, limits.vocab_size)
        ids += tensor.reshape(-1).tolist()
    return tuple(dict.fromkeys(ids))


# The reference's own: no penalty, and the first texts that have ended are the result.
DEFAULT_LENGTH_PENALTY = 0.0
DEFAULT_EARLY_STOPPING = True

# Without a search these ask for nothing: clients send them always.
_NO_SEARCH: Mapping[str, tuple[Scalar, ...]] = {
    "length_penalty": (0.0, 1.0),
    "early_stopping": (False,),
    "beam_search_diversity_rate": (0.0,),
}

# Values that neither draw nor filter. What is not here has none that beams go with.
_GREEDY: Mapping[str, tuple[Scalar, ...]] = {
    "temperature": (0.0, 1.0),
    "top_k": (0, 1),
    "min_p": (0.0,),
    "top_p_decay": (1.0,),
}
_NOT_WITH_BEAMS = ("stream", "return_context_logits", "return_generation_logits", "num_log_probs")


def read_beam_params(scalars: Mapping[str, Scalar]) -> BeamParams | None:
    """The search that one row asks for; None without `beam_width` > 1.

    Args:
        scalars: the row's checked fields.

    Raises:
        InvalidRequestError: names the field, its value and what is allowed.
    """
    width = int(scalars.get("beam_width", 1))
    if width == 1:
        for name, allowed in _NO_SEARCH.items():
            _check_value(scalars, name, allowed, "without beams (beam_width > 1)")
        return None
    with_beams = f"with beam_width = {width}"
    for name in _NOT_WITH_BEAMS:
        if scalars.get(name):
            raise InvalidRequestError(
                f"{name} = {scalars[name]!r} is not supported {with_beams}: do not send it"
            )
    for name, allowed in _GREEDY.items():
        _check_value(scalars, name, allowed, f"{with_beams}, as nothing is drawn")
    top_p = float(scalars.get("top_p", 0.0))
    if 0 < top_p < 1:
        raise InvalidRequestError(
            f"top_p = {top_p}: expected 1.0 or at most 0.0 {with_beams}, as nothing is drawn"
        )
    if int(scalars.get("num_return_sequences", 1)) > width:
        raise InvalidRequestError(
            f"num_return_sequences = {scalars['num_return_sequences']}: expected at most {width} {with_beams}"
        )
    return BeamParams(
        length_penalty=float(scalars.get("length_penalty", DEFAULT_LENGTH_PENALTY)),
        stops_early=bool(scalars.get("early_stopping", DEFAULT_EARLY_STOPPING)),
        diversity_rate=float(scalars.get("beam_search_diversity_rate", 0.0)),
    )


def without_drawing(params: SamplingParams) -> SamplingParams:
    """A row's parameters as a search needs them.

    Raises:
        InvalidRequestError: there are stop words, which a search can not end with.
    """
    if params.stop_sequences:
        raise InvalidRequestError(
            "stop_words_list is not supported with beam_width > 1: expected no words "
            "(stop_token_ids end a beam)"
        )
    return msgspec.structs.replace(params, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)


def _check_value(scalars: Mapping[str, Scalar], name: str, allowed: tuple[Scalar, ...], where: str) -> None:
    if name in scalars and scalars[name] not in allowed:
        expected = " or ".join(str(value) for value in allowed)
        raise InvalidRequestError(f"{name} = {scalars[name]!r}: expected {expected} {where}")


def check_token_ids(name: str, ids: Array, vocab_size: int) -> None:
    """Every id must be one of the vocabulary.

    Raises:
        InvalidRequestError: names the field and the first id that is not.
    """
    bad = ids[(ids < 0) | (ids >= vocab_size)]
    if bad.size:
        raise InvalidRequestError(f"{name} holds {int(bad[0])}: expected token ids in [0, {vocab_size})")


def read_offered_token_ids(tensor: Array | None, limits: ModelLimits) -> tuple[int, ...]:
    """The client's guess at how the output begins (`draft_input_ids`); may be empty.

    Raises:
        InvalidRequestError: too many ids, or one outside of the vocabulary.
    """
    if tensor is None:
        return ()
    ids = tensor.reshape(-1)
    if ids.size > MAX_OFFERED_TOKENS:
        raise InvalidRequestError(
            f"draft_input_ids has {ids.size} ids: at most {MAX_OFFERED_TOKENS} are allowed"
        )
    check_token_ids("draft_input_ids", ids, limits.vocab_size)
    return tuple(ids.tolist())


def read_allowed_token_ids(tensor: Array | None, limits: ModelLimits) -> tuple[int, ...]:
    """The only ids that are possible; empty = all.

    Raises:
        InvalidRequestError: more ids than there are, or one out of range.
    """
    if tensor is None:
        return ()
    if tensor.size > limits.vocab_size:
        raise InvalidRequestError(
            f"allowed_token_ids has {tensor.size} ids: at most {limits.vocab_size} are allowed"
        )
    check_token_ids("allowed_token_ids", tensor, limits.vocab_size)
    return tuple(dict.fromkeys(tensor.reshape(-1).tolist()))


def read_logit_bias(tensors: Mapping[str, Array], limits: ModelLimits) -> tuple[tuple[int, float], ...]:
    """The biases of a row: `embedding_bias` and the pairs of `logit_bias_ids` and `_values`.

    What is said of one id in several places is added up, as the reference adds up its words.

    Returns:
        (id, value) pairs in the ids' order, without zeros; no id twice.

    Raises:
        InvalidRequestError: names field, value and what is allowed.
    """
    sums: defaultdict[int, float] = defaultdict(float)
    for token_id, value in [*_embedding_bias(tensors, limits), *_pairs(tensors, limits)]:
        sums[token_id] += value
    for token_id, value in sums.items():
        if abs(value) > MAX_BIAS:
            raise InvalidRequestError(
                f"the biases of token {token_id} add up to {value}: expected {-MAX_BIAS} … {MAX_BIAS}"
            )
    return tuple((token_id, value) for token_id, value in sorted(sums.items()) if value)


def check_biases(name: str, values: Array) -> None:
    """Every bias must be finite and within bounds.

    Raises:
        InvalidRequestError: names the field and the first value that is not.
    """
    bad = values[~(np.abs(values) <= MAX_BIAS)]
    if bad.size:
        raise InvalidRequestError(
            f"{name} holds {float(bad[0])}: expected finite numbers in [{-MAX_BIAS}, {MAX_BIAS}]"
        )


def _embedding_bias(tensors: Mapping[str, Array], limits: ModelLimits) -> list[tuple[int, float]]:
    """The entries that are not 0 of a dense [vocab_size] vector."""
    tensor = tensors.get("embedding_bias")
    if tensor is None or tensor.size == 0:
        return []
    values = tensor.reshape(-1)
    if values.size != limits.vocab_size:
        raise InvalidRequestError(
            f"embedding_bias has {values.size} values: expected 0 or {limits.vocab_size}, "
            "the size of the vocabulary"
        )
    check_biases("embedding_bias", values)
    ids = np.flatnonzero(values)
    if ids.size > MAX_BIASED_IDS:
        raise InvalidRequestError(
            f"embedding_bias has {ids.size} values that are not 0: at most {MAX_BIASED_IDS} are allowed"
        )
    return list(zip(ids.tolist(), values[ids].tolist(), strict=True))


def _pairs(tensors: Mapping[str, Array], limits: ModelLimits) -> list[tuple[int, float]]:
    empty = np.zeros(0)
    ids = tensors.get("logit_bias_ids", empty).reshape(-1)
    values = tensors.get("logit_bias_values", empty).reshape(-1)
    if ids.size != values.size:
        raise InvalidRequestError(
            f"logit_bias_ids has {ids.size} ids and logit_bias_values {values.size} values: "
            "expected as many of each"
        )
    if ids.size > MAX_BIASED_IDS:
        raise InvalidRequestError(f"logit_bias_ids has {ids.size} ids: at most {MAX_BIASED_IDS} are allowed")
    check_token_ids("logit_bias_ids", ids, limits.vocab_size)
    check_biases("logit_bias_values", values)
    return list(zip(ids.tolist(), values.tolist(), strict=True))


# More than the text behind a prompt ever depends on.
MAX_PROMPT_TAIL_IDS = 16
MAX_PROMPT_CHARS = 1 << 30

_decoder = msgspec.json.Decoder(TextContext)


def read_text_context(tensor: Array | None, vocab_size: int) -> TextContext | None:
    """The row's text context, checked like everything a client sends; None: no detokenizer follows.

    Raises:
        InvalidRequestError: names the field of the context, its value and what is allowed.
    """
    if tensor is None:
        return None
    try:
        context = _decoder.decode(tensor.item())
    except (msgspec.ValidationError, msgspec.DecodeError, TypeError, ValueError):
        raise InvalidRequestError("text_context is not what Naiad's tokenizer model writes") from None
    _check_stop_strings(context.stop_strings)
    ids = context.prompt_tail_ids
    if len(ids) > MAX_PROMPT_TAIL_IDS:
        raise InvalidRequestError(
            f"text_context: prompt_tail_ids has {len(ids)} ids: at most {MAX_PROMPT_TAIL_IDS} are allowed"
        )
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequestError(
                f"text_context: prompt_tail_ids holds {token_id}: expected token ids in [0, {vocab_size})"
            )
    if not 0 <= context.num_prompt_chars <= MAX_PROMPT_CHARS:
        raise InvalidRequestError(
            f"text_context: num_prompt_chars = {context.num_prompt_chars}: expected 0 … {MAX_PROMPT_CHARS}"
        )
    return context


def _check_stop_strings(stop_strings: tuple[str, ...]) -> None:
    if len(stop_strings) > MAX_STOP_WORDS:
        raise InvalidRequestError(
            f"text_context: stop_strings has {len(stop_strings)} entries: "
            f"at most {MAX_STOP_WORDS} are allowed"
        )
    for string in stop_strings:
        # A lone surrogate can be written in JSON, but it is no text.
        num_bytes = len(string.encode("utf-8", "surrogatepass"))
        if not 1 <= num_bytes <= MAX_WORD_BYTES:
            raise InvalidRequestError(
                f"text_context: stop_strings has an entry of {num_bytes} bytes: expected 1 … {MAX_WORD_BYTES}"
            )


_RANGE = "retention_token_range_"
_STARTS, _ENDS, _PRIORITIES = (f"{_RANGE}{name}" for name in ("starts", "ends", "priorities"))
_DURATIONS = f"{_RANGE}durations_ms"
_DECODE_PRIORITY, _DECODE_DURATION = "retention_decode_priority", "retention_decode_duration_ms"
_MAX_KV_PRIORITY = 100
# The reference's "none": a range without an end, a priority without one.
_NONE = -1


def read_retention(tensors: Mapping[str, Array]) -> KVRetention | None:
    """What one row asks for; None: nothing.

    Raises:
        InvalidRequestError: names the field, its value and what is allowed.
    """
    values = {
        name: [int(each) for each in tensors[name].reshape(-1).tolist()]
        for name in (_STARTS, _ENDS, _PRIORITIES, _DURATIONS, _DECODE_PRIORITY, _DECODE_DURATION)
        if name in tensors and tensors[name].size
    }
    if not values:
        return None
    ranges = _read_ranges(values)
    decode_priority = _only(values, _DECODE_PRIORITY, DEFAULT_KV_PRIORITY)
    _check_range(_DECODE_PRIORITY, decode_priority, 0, _MAX_KV_PRIORITY)
    duration_s = _seconds(_DECODE_DURATION, _only(values, _DECODE_DURATION, _NONE))
    return KVRetention(ranges=ranges, decode_priority=decode_priority, decode_duration_s=duration_s)


def _read_ranges(values: Mapping[str, list[int]]) -> tuple[tuple[int, int, int, float], ...]:
    starts = values.get(_STARTS, [])
    if len(starts) > MAX_RETENTION_RANGES:
        raise InvalidRequestError(
            f"{_STARTS} has {len(starts)} values: at most {MAX_RETENTION_RANGES} are allowed"
        )
    for name in (_ENDS, _PRIORITIES, _DURATIONS):
        is_left_out = name == _DURATIONS and name not in values
        if not is_left_out and len(values.get(name, [])) != len(starts):
            raise InvalidRequestError(
                f"{name} has {len(values.get(name, []))} values: expected {len(starts)}, as {_STARTS} has"
            )
    ranges = []
    durations = values.get(_DURATIONS, [_NONE] * len(starts))
    for start, end, priority, duration_ms in zip(
        starts, values.get(_ENDS, []), values.get(_PRIORITIES, []), durations, strict=True
    ):
        _check_range(_STARTS, start, 0, INT32_MAX)
        if end != _NONE:
            _check_range(_ENDS, end, start + 1, INT32_MAX)
        _check_range(_PRIORITIES, priority, 0, _MAX_KV_PRIORITY)
        behind = INT32_MAX if end == _NONE else end
        ranges.append((start, behind, priority, _seconds(_DURATIONS, duration_ms)))
    return tuple(ranges)


def _only(values: Mapping[str, list[int]], name: str, default: int) -> int:
    sent = values.get(name, [default])
    if len(sent) != 1:
        raise InvalidRequestError(f"{name} has {len(sent)} values a row: expected one")
    return sent[0]


def _check_range(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise InvalidRequestError(f"{name} holds {value}: expected {least} … {most}")


def _seconds(name: str, duration_ms: int) -> float:
    """Infinity where there is none."""
    if duration_ms == _NONE:
        return math.inf
    _check_range(name, duration_ms, 0, INT32_MAX)
    return duration_ms / 1000
