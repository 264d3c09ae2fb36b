"""Lists of words at the text level: read and checked, encoded, and made biases of."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from naiad.errors import InvalidRequestError
from naiad.tokenization import Tokenizer, pack_word_list
from naiad.triton_server.logit_fields import check_biases
from naiad.triton_server.request_fields import Array, decoded, num_utf8_bytes
from naiad.triton_server.request_limits import MAX_BIASED_IDS, MAX_WORD_BYTES


def read_words(
    name: str, tensor: Array | None, parameter: Any, num_rows: int, max_words: int
) -> list[list[str]]:
    """Each row's words; "" is padding, as the reference's clients send it.

    Args:
        name: for messages.
        tensor: [num_rows, n] strings, or None when it was not sent.
        parameter: one word for all rows, or None.
        num_rows: of the request.
        max_words: of a row.

    Raises:
        InvalidRequestError: names the field and what is allowed.
    """
    if tensor is None:
        rows = [[str(parameter)] if parameter is not None else []] * num_rows
    else:
        rows = [[decoded(name, raw) for raw in row] for row in tensor.reshape(num_rows, -1).tolist()]
    rows = [[word for word in row if word] for row in rows]
    for row in rows:
        if len(row) > max_words:
            raise InvalidRequestError(f"{name} has {len(row)} entries: at most {max_words} are allowed")
        _check_lengths(name, row)
    return rows


def read_word_weights(
    words: Array | None, weights: Array | None, num_rows: int
) -> list[list[tuple[str, float]]]:
    """Each row's `embedding_bias_words` with their weights; "" is padding, whatever its weight.

    Args:
        words: [num_rows, n] strings, or None.
        weights: [num_rows, n] numbers, or None.
        num_rows: of the request.

    Raises:
        InvalidRequestError: names the field and what is allowed.
    """
    num_words = 0 if words is None else words.size // num_rows
    num_weights = 0 if weights is None else weights.size // num_rows
    if num_words != num_weights:
        raise InvalidRequestError(
            f"embedding_bias_words has {num_words} words and embedding_bias_weights {num_weights} "
            "weights: expected as many of each"
        )
    if words is None or weights is None:
        return [[]] * num_rows
    if num_words > MAX_BIASED_IDS:
        raise InvalidRequestError(
            f"embedding_bias_words has {num_words} entries: at most {MAX_BIASED_IDS} are allowed"
        )
    check_biases("embedding_bias_weights", weights)
    rows = []
    pairs = zip(words.reshape(num_rows, -1).tolist(), weights.reshape(num_rows, -1).tolist(), strict=True)
    for raws, values in pairs:
        texts = [decoded("embedding_bias_words", raw) for raw in raws]
        _check_lengths("embedding_bias_words", texts)
        rows.append([(text, value) for text, value in zip(texts, values, strict=True) if text])
    return rows


def embedding_bias(
    tokenizer: Tokenizer, rows: list[list[tuple[str, float]]], vocab_size: int
) -> npt.NDArray[np.float32]:
    """Each word's weight added to the logit of each of its ids, as the reference does.

    Returns:
        [num_rows, vocab_size]; [num_rows, 0] if no row has a word.

    Raises:
        InvalidRequestError: a row has too many ids, or one that the model does not have.
    """
    if not any(rows):
        return np.zeros((len(rows), 0), dtype=np.float32)
    dense = np.zeros((len(rows), vocab_size), dtype=np.float32)
    for target, row in zip(dense, rows, strict=True):
        biased = set()
        for word, weight in row:
            ids = tokenizer.encode(word, add_special_tokens=False)
            if ids and max(ids) >= vocab_size:
                raise InvalidRequestError(
                    f"embedding_bias_words makes the token {max(ids)}: expected ids in [0, {vocab_size})"
                )
            np.add.at(target, ids, weight)
            biased |= set(ids)
        if len(biased) > MAX_BIASED_IDS:
            raise InvalidRequestError(
                f"embedding_bias_words makes {len(biased)} tokens: at most {MAX_BIASED_IDS} are allowed"
            )
        check_biases("embedding_bias_weights, added up for each token,", target)
    return dense


def pack_rows(rows: list[list[list[int]]]) -> npt.NDArray[np.int32]:
    """Each row's sequences of ids in the reference's packed form, padded to the longest.

    Returns:
        [num_rows, 2, n].
    """
    packed = [pack_word_list(words) for words in rows]
    width = max(each.shape[1] for each in packed)
    filled = np.zeros((len(packed), 2, width), dtype=np.int32)
    filled[:, 1] = -1
    for target, each in zip(filled, packed, strict=True):
        target[:, : each.shape[1]] = each
    return filled


def _check_lengths(name: str, words: list[str]) -> None:
    longest = max((num_utf8_bytes(name, word) for word in words), default=0)
    if longest > MAX_WORD_BYTES:
        raise InvalidRequestError(
            f"{name} has an entry of {longest} bytes: at most {MAX_WORD_BYTES} are allowed"
        )
