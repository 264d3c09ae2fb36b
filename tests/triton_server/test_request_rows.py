"""Requests of several rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from helpers.triton_server_doubles import LIMITS, FakeSource
from naiad.errors import InvalidRequestError
from naiad.frontend.request import GenerateRequest
from naiad.tokenization import pack_word_list
from naiad.triton_server.requests.llm import read_request


def read(source: FakeSource) -> GenerateRequest:
    request = read_request(source, LIMITS)
    assert isinstance(request, GenerateRequest)
    return request


def test_rows_have_their_own_prompts_and_stop_words() -> None:
    words = np.stack([pack_word_list([[7, 8]]), pack_word_list([[9, 1]])])
    source = FakeSource(
        {
            "input_ids": np.array([[1, 2, 3], [4, 5, 0]], dtype=np.int32),
            "input_lengths": np.array([[3], [2]], dtype=np.int32),
            "request_output_len": np.array([[4], [4]], dtype=np.int32),
            "stop_words_list": words,
        }
    )
    rows = read(source).rows
    assert [row.prompt_token_ids for row in rows] == [[1, 2, 3], [4, 5]]
    assert [row.params.stop_sequences for row in rows] == [((7, 8),), ((9, 1),)]


def two_rows(**tensors: Any) -> FakeSource:
    columns = {name: np.array([[value] for value in values]) for name, values in tensors.items()}
    source = FakeSource(
        {
            "input_ids": np.array([[1], [4]], dtype=np.int32),
            "input_lengths": np.array([[1], [1]], dtype=np.int32),
            "request_output_len": np.array([[4], [5]], dtype=np.int32),
        }
    )
    source.inputs |= columns
    return source


def test_rows_have_their_own_sampling() -> None:
    rows = read(two_rows(temperature=[0.5, 0.0], end_id=[7, -1])).rows
    assert [row.params.max_tokens for row in rows] == [4, 5]
    assert [row.params.temperature for row in rows] == [0.5, 0.0]
    assert [row.params.stop_token_ids for row in rows] == [(2, 7), (2,)]


def test_one_bad_row_refuses_the_request() -> None:
    with pytest.raises(InvalidRequestError, match=r"temperature = -1.0"):
        read_request(two_rows(temperature=[0.5, -1.0]), LIMITS)


def test_rows_can_not_disagree_on_streaming() -> None:
    with pytest.raises(InvalidRequestError, match="streaming differs between the rows"):
        read_request(two_rows(streaming=[True, False]), LIMITS)


def test_rows_have_their_own_salts() -> None:
    rows = read(two_rows(cache_salt=[b"a", b""])).rows
    assert [row.cache_salt for row in rows] == ["a", ""]
