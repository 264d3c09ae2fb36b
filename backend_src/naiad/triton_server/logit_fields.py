"""Fields that name token ids: biases on their logits, the ids that are possible at all, drafts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import numpy as np

from naiad.errors import InvalidRequestError
from naiad.triton_server.request_fields import Array
from naiad.triton_server.request_limits import MAX_BIAS, MAX_BIASED_IDS, MAX_OFFERED_TOKENS, ModelLimits


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
