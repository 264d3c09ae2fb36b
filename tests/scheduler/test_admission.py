from __future__ import annotations

import math
from typing import Any

import pytest

from naiad.errors import InvalidRequestError
from naiad.kv_cache.kv_cache_manager import KVCacheManager
from naiad.scheduler.admission import AdmissionLimits
from naiad.sequence import BeamParams, EngineRequest, SamplingParams, TextContext, TopPDecay

GROUPS = KVCacheManager(6, block_size=4).groups
LIMITS = AdmissionLimits(max_model_len=8, vocab_size=100, max_num_seqs=4, kv_groups=GROUPS)


def make_request(
    prompt: list[int],
    max_tokens: int = 1,
    text: TextContext | None = None,
    draft: tuple[int, ...] = (),
    biases: tuple[tuple[int, float], ...] = (),
    allowed: tuple[int, ...] = (),
) -> EngineRequest:
    params = SamplingParams(max_tokens=max_tokens, logit_bias=biases, allowed_token_ids=allowed)
    return EngineRequest(
        sequence_id=1, prompt_token_ids=prompt, params=params, text=text, draft_token_ids=draft
    )


def test_longest_prompt_and_greatest_id_pass() -> None:
    LIMITS.check(make_request([0] + [99] * 6, biases=((0, 1.0), (99, -1.0)), allowed=(0, 99)))


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (make_request([]), "input_ids is empty"),
        (make_request([1] * 8), "input_ids has 8 tokens: expected at most 7"),
        (make_request([1, 100]), "token id 100: expected ids in"),
        (make_request([-1, 5]), "token id -1: expected ids in"),
        (make_request([1], draft=(5, 100)), "draft_input_ids contains the token id 100: expected ids in"),
        (make_request([1], draft=(-1, 5)), "draft_input_ids contains the token id -1"),
        (
            make_request([1], biases=((5, 1.0), (100, 1.0))),
            "logit_bias contains the token id 100",
        ),
        (make_request([1], biases=((-1, 1.0),)), "logit_bias contains the token id -1"),
        (make_request([1], allowed=(100, 5)), "allowed_token_ids contains the token id 100: expected ids in"),
        (make_request([1], allowed=(5, -1)), "allowed_token_ids contains the token id -1"),
        (make_request([1], max_tokens=0), "max_tokens = 0"),
        (make_request([1], text=TextContext(stop_strings=("a", ""))), "stop_strings has an empty entry"),
        (make_request([1], text=TextContext(prompt_tail_ids=(1, 100))), "prompt_tail_ids contains .* 100"),
    ],
)
def test_what_can_never_run_is_refused_by_name_and_value(request_: EngineRequest, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        LIMITS.check(request_)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"bad_words": ((),)}, "bad_words has an empty entry"),
        ({"bad_words": ((5,), (), (6, 7))}, "bad_words has an empty entry"),
        ({"top_k": -1}, "top_k = -1: expected at least 0"),
        ({"num_candidates": 1}, "num_candidates = 1: expected 0"),
        ({"num_candidates": -1}, "num_candidates = -1: expected 0"),
        ({"top_p_decay": TopPDecay(1e300, 0.1)}, r"top_p_decay = 1e\+300: expected a number > 0 and < 1"),
        ({"top_p_decay": TopPDecay(math.nan, 0.1)}, "top_p_decay = nan"),
        ({"top_p_decay": TopPDecay(0.0, 0.1)}, r"top_p_decay = 0\.0"),
    ],
)
def test_parameters_that_would_fail_a_step_are_refused(params: dict[str, Any], words: str) -> None:
    asked = SamplingParams(max_tokens=1, **params)
    with pytest.raises(InvalidRequestError, match=words):
        LIMITS.check(EngineRequest(sequence_id=1, prompt_token_ids=[1], params=asked))


def make_search(length_penalty: float) -> EngineRequest:
    return EngineRequest(
        sequence_id=1,
        sibling_ids=(2,),
        prompt_token_ids=[1],
        params=SamplingParams(max_tokens=1),
        beam=BeamParams(length_penalty=length_penalty),
    )


@pytest.mark.parametrize("length_penalty", [10.5, -11.0, math.inf, -math.inf, math.nan])
def test_a_penalty_that_could_overflow_a_score_is_refused(length_penalty: float) -> None:
    LIMITS.check(make_search(math.copysign(10.0, length_penalty)))
    with pytest.raises(InvalidRequestError, match=r"length_penalty = .*: expected -10 … 10"):
        LIMITS.check(make_search(length_penalty))


def test_no_more_tokens_are_asked_for_than_the_models_length_leaves() -> None:
    assert LIMITS.clamp(make_request([1, 2, 3], max_tokens=5)).params.max_tokens == 5
    assert LIMITS.clamp(make_request([1, 2, 3], max_tokens=6)).params.max_tokens == 5


def test_ids_that_are_only_compared_may_be_unknown_to_the_model() -> None:
    params = SamplingParams(
        max_tokens=1,
        stop_token_ids=(100,),
        stop_sequences=((100,),),
        bad_words=((5, 100),),
        top_p_decay=TopPDecay(0.9, 0.1, reset_id=100),
    )
    LIMITS.check(EngineRequest(sequence_id=1, prompt_token_ids=[1], params=params))
