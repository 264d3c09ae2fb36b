from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from naiad.errors import InvalidRequestError
from naiad.tokenization import pack_word_list, unpack_word_list


def test_packed_form() -> None:
    packed = pack_word_list([[5, 6], [7]])
    assert packed.dtype == np.int32
    assert packed.tolist() == [[5, 6, 7], [2, 3, -1]]


def test_no_words_are_an_empty_array() -> None:
    assert pack_word_list([]).shape == (2, 0)


@given(st.lists(st.lists(st.integers(0, 2**31 - 1), min_size=1), max_size=9), st.integers(0, 5))
def test_unpack_inverts_pack_whatever_the_padding(words: list[list[int]], num_padding: int) -> None:
    padding = np.array([[0], [-1]], dtype=np.int32).repeat(num_padding, axis=1)
    assert unpack_word_list(np.concatenate([pack_word_list(words), padding], axis=1)) == words


@pytest.mark.parametrize(
    "packed",
    [
        np.zeros((3, 2), np.int32),
        np.zeros(4, np.int32),
        np.ones((2, 1), np.float32),
        np.array([[1, 2], [3, -1]], np.int32),
        np.array([[1, 2], [0, -1]], np.int32),
        np.array([[1, 2], [2, 1]], np.int32),
        np.array([[1, 2], [-1, 2]], np.int32),
        np.array([[1, 2], [-5, -1]], np.int32),
    ],
)
def test_malformed_lists_are_refused(packed: np.ndarray) -> None:
    with pytest.raises(InvalidRequestError, match="word list"):
        unpack_word_list(packed)
