"""An abort that meets a sequence's last token, in both orders: the sequence ends once."""

from __future__ import annotations

import pytest

from helpers.engine_drive import EngineDrive, solo_tokens
from naiad.sequence import FinishReason, SamplingParams

PROMPT = [7, 8, 9, 10, 11]
EXPECTED = solo_tokens(PROMPT, 4)
# How a sequence ends, its reason, and its tokens.
ENDS = [
    (SamplingParams(max_tokens=4), FinishReason.LENGTH, EXPECTED),
    (SamplingParams(max_tokens=9, stop_token_ids=(EXPECTED[3],)), FinishReason.STOP, EXPECTED[:3]),
]


def before_the_last_token(params: SamplingParams, *, overlaps: bool) -> EngineDrive:
    """An engine whose next step brings the sequence's last token; with overlap that step is under way."""
    drive = EngineDrive(overlaps=overlaps)
    drive.add(1, PROMPT, params)
    for _ in range(3):
        drive.step()
    assert drive.tokens[1] == EXPECTED[:3]
    assert drive.finals == {}
    assert bool(drive.runner.under_way) == overlaps
    return drive


def assert_nothing_is_left(drive: EngineDrive) -> None:
    drive.run()
    assert drive.engine.stats().num_used_blocks == 0
    assert drive.engine.stats().num_running == 0
    assert not drive.runner.under_way
    # Another sequence finds everything as it was; an output too many for the first one fails the drive.
    drive.add(2, PROMPT)
    drive.run()
    assert drive.tokens[2] == solo_tokens(PROMPT, 5)
    assert drive.finals.keys() == {1, 2}


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("params", [params for params, _, _ in ENDS])
def test_an_abort_before_the_last_token_cancels(overlaps: bool, params: SamplingParams) -> None:
    drive = before_the_last_token(params, overlaps=overlaps)
    drive.abort(1)
    assert drive.reason(1) is FinishReason.CANCELLED
    assert drive.step() == []
    assert_nothing_is_left(drive)
    assert drive.tokens[1] == EXPECTED[:3]


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize(("params", "reason", "tokens"), ENDS)
def test_an_abort_after_the_last_token_changes_nothing(
    overlaps: bool, params: SamplingParams, reason: FinishReason, tokens: list[int]
) -> None:
    drive = before_the_last_token(params, overlaps=overlaps)
    drive.step()
    assert drive.reason(1) is reason
    assert drive.engine.abort(1) is None
    assert_nothing_is_left(drive)
    assert drive.tokens[1] == tokens
