"""How one row is sampled and when it ends: checked fields to `SamplingParams`."""

from __future__ import annotations

import secrets
from collections.abc import Mapping

import msgspec
import numpy as np

from naiad.errors import InvalidRequestError
from naiad.sequence import SamplingParams, TopPDecay
from naiad.tokenization import unpack_word_list
from naiad.triton_server.logit_fields import check_token_ids, read_allowed_token_ids, read_logit_bias
from naiad.triton_server.output_wishes import OutputWishes
from naiad.triton_server.request_fields import Array, Scalar, required
from naiad.triton_server.request_limits import (
    MAX_BAD_WORD_SEQUENCES,
    MAX_BAD_WORD_TOKENS,
    MAX_STOP_TOKEN_IDS,
    MAX_STOP_WORD_TOKENS,
    MAX_STOP_WORDS,
    ModelLimits,
)

# The reference's own.
DEFAULT_TOP_P_MIN = 1e-6


def read_sampling_params(
    tensors: Mapping[str, Array],
    scalars: Mapping[str, Scalar],
    limits: ModelLimits,
    wishes: OutputWishes,
    *,
    num_prompt_tokens: int,
    has_text: bool,
) -> SamplingParams:
    """Everything that decides a row's tokens.

    Args:
        tensors: the row's lists, each [1, …].
        scalars: its checked scalar fields.
        limits: of the model.
        wishes: of the request.
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
        num_log_probs=wishes.num_engine_log_probs,
        returns_context_logits=wishes.context_logits,
        returns_generation_logits=wishes.generation_logits,
        returns_perf_metrics=wishes.perf_metrics,
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
