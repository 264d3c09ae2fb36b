from __future__ import annotations

import pytest

from naiad.sampling.stop_checker import Stop, check_stop
from naiad.sequence import FinishReason, SamplingParams, Sequence

LENGTH = Stop(FinishReason.LENGTH)


def check(params: SamplingParams, output: list[int]) -> Stop | None:
    prompt = [5, 6]
    sequence = Sequence(
        sequence_id=1,
        token_ids=prompt + output,
        num_prompt_tokens=len(prompt),
        params=params,
        arrival_s=0.0,
    )
    return check_stop(sequence, sequence.num_tokens)


def test_nothing_stops() -> None:
    assert check(SamplingParams(max_tokens=3, stop_token_ids=(9,)), [1, 2]) is None


def test_stop_id_is_not_kept() -> None:
    params = SamplingParams(max_tokens=3, stop_token_ids=(8, 9))
    assert check(params, [1, 9]) == Stop(FinishReason.STOP, keeps_token=False, stop_reason="9")


def test_stop_id_beats_the_length() -> None:
    stop = check(SamplingParams(max_tokens=2, stop_token_ids=(9,)), [1, 9])
    assert stop is not None
    assert stop.finish_reason is FinishReason.STOP


@pytest.mark.parametrize(("output", "stops"), [([9], False), ([1, 9], False), ([1, 2, 9], True)])
def test_stop_id_counts_only_after_min_tokens(output: list[int], stops: bool) -> None:
    params = SamplingParams(max_tokens=9, min_tokens=2, stop_token_ids=(9,))
    assert (check(params, output) is not None) == stops


def test_stop_sequence_is_kept() -> None:
    params = SamplingParams(max_tokens=9, stop_sequences=((3, 4), (1, 2)))
    assert check(params, [7, 1, 2]) == Stop(FinishReason.STOP, stop_reason="1,2")


def test_stop_sequence_does_not_begin_in_the_prompt() -> None:
    assert check(SamplingParams(max_tokens=9, stop_sequences=((6, 1),)), [1]) is None


def test_min_tokens_does_not_hold_back_stop_sequences() -> None:
    params = SamplingParams(max_tokens=9, min_tokens=5, stop_sequences=((1,),))
    assert check(params, [1]) is not None


def test_max_tokens() -> None:
    assert check(SamplingParams(max_tokens=2), [1, 2]) == LENGTH
