"""Packs lists of token sequences as the word lists of TensorRT-LLM's backend.

Row 0 holds the ids of all sequences, one after another, padded with 0. Row 1 holds the end of each
sequence in row 0, padded with −1.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from naiad.errors import InvalidRequestError


def pack_word_list(words: list[list[int]]) -> npt.NDArray[np.int32]:
    """Pack sequences of ids; empty ones are left out.

    Returns:
        int32 [2, n], where n is the larger of the number of ids and of sequences.
    """
    kept = [word for word in words if word]
    ids = [token_id for word in kept for token_id in word]
    packed = np.zeros((2, len(ids)), dtype=np.int32)
    packed[1] = -1
    packed[0] = ids
    packed[1, : len(kept)] = np.cumsum([len(word) for word in kept], dtype=np.int32)
    return packed


def unpack_word_list(packed: npt.NDArray[Any]) -> list[list[int]]:
    """Return the sequences of a packed list.

    Args:
        packed: integers [2, n], n ≥ 0.

    Raises:
        InvalidRequestError: the shape or dtype is wrong, or the offsets do not increase within [1, n].
    """
    if packed.ndim != 2 or packed.shape[0] != 2 or not np.issubdtype(packed.dtype, np.integer):
        raise InvalidRequestError(
            f"word list of shape {list(packed.shape)} and type {packed.dtype}: expected INT32 [2, n]"
        )
    ids: list[int] = packed[0].tolist()
    ends: list[int] = packed[1].tolist()
    num_words = ends.index(-1) if -1 in ends else len(ends)
    if any(end != -1 for end in ends[num_words:]):
        raise InvalidRequestError("word list: an offset stands after the padding of -1")
    words = []
    start = 0
    for end in ends[:num_words]:
        if not start < end <= len(ids):
            raise InvalidRequestError(f"word list: offset {end}: expected {start + 1} … {len(ids)}")
        words.append(ids[start:end])
        start = end
    return words
