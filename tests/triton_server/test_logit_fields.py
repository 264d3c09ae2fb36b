from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from helpers.triton_server_doubles import LIMITS, FakeSource, llm_source
from naiad.errors import InvalidRequestError
from naiad.frontend.request import GenerateRequest
from naiad.sequence import SamplingParams
from naiad.tokenization import pack_word_list
from naiad.triton_server.requests.llm import read_request


def params_of(source: FakeSource) -> SamplingParams:
    request = read_request(source, LIMITS)
    assert isinstance(request, GenerateRequest)
    return request.rows[0].params


def ids(*values: int) -> Any:
    return np.array([values], dtype=np.int32)


def numbers(*values: float) -> Any:
    return np.array([values], dtype=np.float32)


def dense(values: dict[int, float]) -> Any:
    bias = np.zeros((1, LIMITS.vocab_size), dtype=np.float32)
    for token_id, value in values.items():
        bias[0, token_id] = value
    return bias


def packed(*words: list[int]) -> Any:
    return pack_word_list(list(words))[None]


def test_nothing_sent_is_off() -> None:
    params = params_of(llm_source())
    assert (params.bad_words, params.logit_bias, params.allowed_token_ids, params.min_p) == ((), (), (), 0)


@pytest.mark.parametrize(
    "switched_off",
    [
        {"bad_words_list": np.zeros((1, 2, 0), dtype=np.int32)},
        {"embedding_bias": numbers()},
        {"embedding_bias": dense({})},
        {"logit_bias_ids": ids(), "logit_bias_values": numbers()},
        {"logit_bias_ids": ids(5), "logit_bias_values": numbers(0)},
        {"allowed_token_ids": ids()},
        {"min_p": 0.0},
    ],
)
def test_values_that_mean_off(switched_off: dict[str, Any]) -> None:
    params = params_of(llm_source(**switched_off))
    assert (params.bad_words, params.logit_bias, params.allowed_token_ids, params.min_p) == ((), (), (), 0)


def test_bad_words_keep_their_order_and_lose_their_doubles() -> None:
    words = packed([7, 8], [9], [7, 8])
    assert params_of(llm_source(bad_words_list=words)).bad_words == ((7, 8), (9,))


def test_bad_words_hold_where_a_detokenizer_follows() -> None:
    params = params_of(llm_source(bad_words_list=packed([7]), text_context=b"{}"))
    assert params.bad_words == ((7,),)


def test_biases_from_all_sources_add_up() -> None:
    sent = {
        "embedding_bias": dense({3: 1.5, 999: -2.0}),
        "logit_bias_ids": ids(3, 0, 3),
        "logit_bias_values": numbers(1.0, 4.0, 0.5),
    }
    assert params_of(llm_source(**sent)).logit_bias == ((0, 4.0), (3, 3.0), (999, -2.0))


def test_biases_that_cancel_leave_none() -> None:
    sent = {"logit_bias_ids": ids(3, 3), "logit_bias_values": numbers(1.0, -1.0)}
    assert params_of(llm_source(**sent)).logit_bias == ()


def test_allowed_ids_lose_their_doubles() -> None:
    assert params_of(llm_source(allowed_token_ids=ids(5, 0, 5, 999))).allowed_token_ids == (5, 0, 999)


def test_the_largest_lists_are_taken() -> None:
    sent = {
        "embedding_bias": dense(dict.fromkeys(range(1000), 1.0)),
        "logit_bias_ids": ids(*[1] * 1024),
        "logit_bias_values": numbers(*[0.5] * 1024),
        "allowed_token_ids": ids(*range(1000)),
        "bad_words_list": packed(*[[n % 1000] for n in range(2048)]),
    }
    params = params_of(llm_source(**sent))
    assert (len(params.logit_bias), len(params.allowed_token_ids), len(params.bad_words)) == (1000,) * 3


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"bad_words_list": packed([1000])}, r"bad_words_list holds 1000: expected token ids in \[0, 1000\)"),
        ({"bad_words_list": packed([3, -4])}, "bad_words_list holds -4"),
        ({"bad_words_list": packed([1] * 513)}, "bad_words_list has a word of 513 tokens: at most 512"),
        ({"bad_words_list": packed(*[[1]] * 2049)}, "bad_words_list has 2049 words: at most 2048"),
        ({"bad_words_list": np.array([[[1, 2], [2, 1]]], dtype=np.int32)}, "word list: offset 1"),
        ({"embedding_bias": numbers(1.0, 2.0)}, "embedding_bias has 2 values: expected 0 or 1000"),
        ({"embedding_bias": dense({3: float("nan")})}, "embedding_bias holds nan: expected finite"),
        ({"embedding_bias": dense({3: float("inf")})}, "embedding_bias holds inf"),
        ({"embedding_bias": dense({3: 1000.5})}, r"embedding_bias holds 1000.5: .* in \[-1000.0, 1000.0\]"),
        ({"logit_bias_ids": ids(3)}, "logit_bias_ids has 1 ids and logit_bias_values 0 values"),
        ({"logit_bias_values": numbers(3)}, "logit_bias_ids has 0 ids and logit_bias_values 1 values"),
        (
            {"logit_bias_ids": ids(*[1] * 1025), "logit_bias_values": numbers(*[0.0] * 1025)},
            "logit_bias_ids has 1025 ids: at most 1024",
        ),
        ({"logit_bias_ids": ids(1000), "logit_bias_values": numbers(1)}, "logit_bias_ids holds 1000"),
        ({"logit_bias_ids": ids(-1), "logit_bias_values": numbers(1)}, "logit_bias_ids holds -1"),
        (
            {"logit_bias_ids": ids(1), "logit_bias_values": numbers(float("nan"))},
            "logit_bias_values holds nan",
        ),
        ({"logit_bias_ids": ids(1), "logit_bias_values": numbers(-1001)}, "logit_bias_values holds -1001.0"),
        (
            {"logit_bias_ids": ids(7, 7), "logit_bias_values": numbers(600, 600)},
            "the biases of token 7 add up to 1200.0: expected -1000.0 … 1000.0",
        ),
        (
            {"logit_bias_ids": ids(7), "logit_bias_values": numbers(600), "embedding_bias": dense({7: 600})},
            "the biases of token 7 add up to 1200.0",
        ),
        ({"allowed_token_ids": ids(1000)}, "allowed_token_ids holds 1000"),
        ({"allowed_token_ids": ids(-1)}, "allowed_token_ids holds -1"),
        ({"allowed_token_ids": ids(*[1] * 1001)}, "allowed_token_ids has 1001 ids: at most 1000"),
    ],
)
def test_bad_lists_are_named(tensors: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match="^" + message):
        read_request(llm_source(**tensors), LIMITS)


def test_too_many_biased_ids_are_refused() -> None:
    limits = LIMITS.__class__(100, 2000, (2,), False)
    bias = np.ones((1, 2000), dtype=np.float32)
    with pytest.raises(InvalidRequestError, match="embedding_bias has 2000 values that are not 0: at most"):
        read_request(llm_source(embedding_bias=bias), limits)
