from __future__ import annotations

import random

import pytest

from helpers.engine_drive import EngineDrive, GuessingDrafter, solo_tokens
from naiad.sequence import FinishReason, SamplingParams, TextContext
from naiad.tokenization.text_stream import TextStream
from naiad.tokenization.token_table import TokenTable

PROMPT = [7, 8, 9]
# Token n is two letters, so stop strings can begin and end inside a token.
TABLE = TokenTable([bytes([97 + n % 26, 65 + n // 26]) for n in range(50)], {}, frozenset())


def text_of(token_ids: list[int]) -> str:
    return b"".join(TABLE.visible_bytes(token_id, False) for token_id in token_ids).decode()


def drive_text(
    stop_strings: tuple[str, ...], params: SamplingParams, num_speculative_tokens: int = 0
) -> EngineDrive:
    drafter = GuessingDrafter(random.Random(0), 0.1)
    drive = EngineDrive(
        text_state=lambda context: TextStream(TABLE, context),
        make_drafter=(lambda *_: drafter) if num_speculative_tokens else None,
        num_speculative_tokens=num_speculative_tokens,
    )
    drive.add(1, PROMPT, params, TextContext(stop_strings=stop_strings, prompt_tail_ids=tuple(PROMPT)))
    return drive


def test_without_stop_strings_tokens_are_sent_at_once_with_their_window() -> None:
    drive = drive_text((), SamplingParams(max_tokens=3))
    outputs = [output for _ in range(3) for output in drive.step()]
    expected = solo_tokens(PROMPT, 3)
    assert [output.token_ids for output in outputs] == [[token_id] for token_id in expected]
    assert [output.window_ids for output in outputs] == [[9], [expected[0]], [expected[1]]]


def test_stop_string_across_tokens_ends_the_sequence_at_once() -> None:
    expected = solo_tokens(PROMPT, 8)
    text = text_of(expected)
    drive = drive_text((text[3:5],), SamplingParams(max_tokens=8))
    outputs = [output for _ in range(3) for output in drive.step()]
    assert not drive.engine.has_work
    assert drive.tokens[1] == expected[:3]
    assert sum(output.num_chars for output in outputs) == 3
    final = drive.finals[1]
    assert (final.finish_reason, final.is_cut, final.stop_reason) == (FinishReason.STOP, True, text[3:5])


def test_held_tokens_are_sent_when_the_length_ends_the_sequence() -> None:
    expected = solo_tokens(PROMPT, 4)
    stop_string = text_of(expected)[2:] + "never"
    drive = drive_text((stop_string,), SamplingParams(max_tokens=4))
    outputs = [output for _ in range(4) for output in drive.step()]
    assert [output.token_ids for output in outputs] == [expected[:1], expected[1:]]
    assert drive.reason(1) is FinishReason.LENGTH
    assert sum(output.num_chars for output in outputs) == 8


def test_held_tokens_are_sent_when_a_stop_id_ends_the_sequence() -> None:
    expected = solo_tokens(PROMPT, 4)
    stop_string = text_of(expected[:2]) + "never"
    drive = drive_text((stop_string,), SamplingParams(max_tokens=4, stop_token_ids=(expected[2],)))
    drive.run()
    assert drive.tokens[1] == expected[:2]
    assert drive.finals[1].stop_reason == str(expected[2])


def test_held_tokens_are_sent_on_abort() -> None:
    expected = solo_tokens(PROMPT, 2)
    drive = drive_text((text_of(expected) + "never",), SamplingParams(max_tokens=9))
    assert [output.only_started for output in drive.step()] == [True]
    assert drive.step() == []
    drive.abort(1)
    assert drive.tokens[1] == expected
    assert drive.reason(1) is FinishReason.CANCELLED


def test_stop_string_on_the_last_allowed_token_beats_the_length() -> None:
    expected = solo_tokens(PROMPT, 3)
    drive = drive_text((text_of(expected)[-2:],), SamplingParams(max_tokens=3))
    drive.run()
    assert drive.reason(1) is FinishReason.STOP


def test_min_tokens_does_not_hold_back_stop_strings() -> None:
    expected = solo_tokens(PROMPT, 2)
    drive = drive_text((text_of(expected)[-2:],), SamplingParams(max_tokens=9, min_tokens=5))
    drive.run()
    assert drive.tokens[1] == expected


@pytest.mark.parametrize("num_speculative_tokens", [1, 3, 8])
@pytest.mark.parametrize(("start", "end"), [(0, 1), (3, 5), (6, 9), (13, 14), (2, 12)])
def test_a_stop_string_inside_a_window_of_drafts_cuts_where_it_does_without(
    start: int, end: int, num_speculative_tokens: int
) -> None:
    stop_strings = (text_of(solo_tokens(PROMPT, 8))[start:end], "never")
    params = SamplingParams(max_tokens=12, stop_token_ids=(solo_tokens(PROMPT, 11)[-1],))
    ends = []
    for num_drafts in (0, num_speculative_tokens):
        drive = drive_text(stop_strings, params, num_drafts)
        outputs = []
        while drive.engine.has_work:
            outputs += drive.step()
        final = drive.finals[1]
        assert drive.engine.stats().total_generation_tokens == len(drive.tokens[1])
        num_chars = sum(output.num_chars for output in outputs)
        ends.append((drive.tokens[1], num_chars, final.finish_reason, final.is_cut, final.stop_reason))
    assert ends[0] == ends[1]
    assert ends[0][3]
