from __future__ import annotations

from collections.abc import Callable

import pytest

from helpers.engine_drive import EngineDrive, solo_beams, solo_tokens
from naiad.engine.beam_groups import beam_rules
from naiad.engine_process.observations import Observations
from naiad.errors import InvalidRequestError
from naiad.kv_cache.prefix_cache import PrefixCache
from naiad.outputs import RequestOutput
from naiad.sampling.beam_search import Beam
from naiad.sequence import (
    BeamParams,
    EngineRequest,
    FinishReason,
    SamplingParams,
    SequenceStatus,
    TextContext,
)
from naiad.snapshot import tenant_label
from naiad.tokenization.text_stream import TextStream
from naiad.tokenization.token_table import TokenTable

PROMPT = [7, 8, 9, 10, 11]
TABLE = TokenTable([bytes([97 + n % 26, 65 + n // 26]) for n in range(50)], {}, frozenset())


def expected_beams(prompt: list[int], params: SamplingParams, width: int, beam: BeamParams) -> list[Beam]:
    request = EngineRequest(
        sequence_id=0,
        prompt_token_ids=prompt,
        params=params,
        sibling_ids=tuple(range(1, width)),
        beam=beam,
    )
    return solo_beams(prompt, beam_rules(request))


def outputs_of(beams: list[Beam]) -> list[list[int]]:
    return [list(beam.token_ids[: len(beam.token_ids) - beam.is_stopped]) for beam in beams]


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("stop_ids", [(), (3, 17, 30, 41)])
@pytest.mark.parametrize("budget", [1, 3, 64])
def test_results_are_those_of_the_search_alone(width: int, stop_ids: tuple[int, ...], budget: int) -> None:
    drive = EngineDrive(budget=budget, prefix_cache=PrefixCache(4))
    params = SamplingParams(max_tokens=9, stop_token_ids=stop_ids, num_log_probs=0)
    beam = BeamParams(length_penalty=0.8)
    drive.add(1, PROMPT, params, sibling_ids=tuple(range(2, 1 + width)), beam=beam)
    drive.add(9, PROMPT)
    drive.run()
    expected = expected_beams(PROMPT, params, width, beam)
    ids = range(1, 1 + width)
    assert [drive.tokens[each] for each in ids] == outputs_of(expected)
    assert [drive.finals[each].cum_log_prob for each in ids] == [each.score for each in expected]
    for each, wanted in zip(ids, expected, strict=True):
        assert drive.reason(each) is (FinishReason.STOP if wanted.is_stopped else FinishReason.LENGTH)
        log_probs = [details.log_prob for details in drive.finals[each].log_probs]
        assert log_probs == list(wanted.log_probs[: len(drive.tokens[each])])


def test_beams_share_the_blocks_of_what_they_have_in_common() -> None:
    drive = EngineDrive(num_blocks=64)
    params = SamplingParams(max_tokens=2)
    drive.add(1, [5] * 40, params, sibling_ids=(2, 3, 4), beam=BeamParams())
    drive.step()
    drive.step()
    assert drive.engine.stats().num_used_blocks == 0
    assert [sum(count for _, count in step) for step in drive.runner.steps] == [40, 4]


def test_a_search_survives_preemption_beside_others() -> None:
    params = SamplingParams(max_tokens=12)
    drive = EngineDrive(num_blocks=16, max_num_seqs=6)
    for number in range(6):
        drive.add(100 + number, [number] * 9, SamplingParams(max_tokens=14))
    drive.add(1, PROMPT, params, sibling_ids=(2, 3), beam=BeamParams())
    for number in range(6):
        drive.add(200 + number, [number] * 7, SamplingParams(max_tokens=14))
    drive.run()
    assert drive.engine.stats().total_preemptions > 0
    expected = expected_beams(PROMPT, params, 3, BeamParams())
    assert [drive.tokens[each] for each in (1, 2, 3)] == outputs_of(expected)


def test_a_row_that_is_computed_again_is_not_the_next_one() -> None:
    """A beam waits for the other, is preempted, and its row is computed again in the step of the other's row.

    The search has all that it needs when the other's row is taken, so it advances. The beam's row, which is
    taken after that, is about the token before.
    """
    drive = EngineDrive(num_blocks=7)
    drive.add(9, [3] * 9, SamplingParams(max_tokens=16))
    drive.step()
    params = SamplingParams(max_tokens=7)
    drive.add(1, PROMPT, params, sibling_ids=(2,), beam=BeamParams())
    drive.step()
    drive.step()
    first, second = (drive.scheduler.running_by_id[each] for each in (1, 2))
    drive.scheduler._preempt(first)
    drive.step()
    assert first.status is SequenceStatus.WAITING, "there is no room until the other request is gone"
    drive.scheduler._preempt(second)
    drive.abort(9)
    assert drive.runner.steps[-1] == [(9, 1), (2, 1)]
    drive.step()
    assert drive.runner.steps[-1] == [(1, 7), (2, 7)]
    drive.run()
    expected = expected_beams(PROMPT, params, 2, BeamParams())
    assert [drive.tokens[each] for each in (1, 2)] == outputs_of(expected)


def test_searches_that_hold_each_other_up_all_end() -> None:
    # No two of the searches fit the cache together.
    drive = EngineDrive(num_blocks=12, block_size=2, max_num_seqs=8)
    params = SamplingParams(max_tokens=7)
    for number in range(6):
        salt = "ab"[number % 2]
        first = 10 * (number + 1)
        drive.add(
            first,
            [number] * 1,
            params,
            sibling_ids=(first + 1, first + 2),
            beam=BeamParams(),
            cache_salt=salt,
        )
    drive.run(max_steps=2000)
    assert drive.engine.stats().total_preemptions > 0
    for number in range(6):
        first = 10 * (number + 1)
        expected = outputs_of(expected_beams([number], params, 3, BeamParams()))
        assert [drive.tokens[first + each] for each in range(3)] == expected


def test_cancelling_one_id_ends_the_search_and_each_id_once() -> None:
    drive = EngineDrive()
    drive.add(1, PROMPT, SamplingParams(max_tokens=50), sibling_ids=(2, 3), beam=BeamParams())
    for _ in range(4):
        drive.step()
    drive.abort(2)
    assert drive.engine.stats().num_used_blocks == 0
    drive.run()
    assert {drive.reason(each) for each in (1, 2, 3)} == {FinishReason.CANCELLED}


def test_a_failed_beam_fails_its_search_alone() -> None:
    drive = EngineDrive()
    drive.add(1, PROMPT, SamplingParams(max_tokens=50), sibling_ids=(2, 3), beam=BeamParams())
    drive.add(9, PROMPT)
    for _ in range(3):
        drive.step()
    drive.runner.failing.add(3)
    drive.run()
    assert {drive.finals[each].error_message for each in (1, 2, 3)} == {"the row failed"}
    assert drive.reason(9) is FinishReason.LENGTH


def test_a_deadline_gives_the_best_so_far() -> None:
    drive = EngineDrive()
    params = SamplingParams(max_tokens=50)
    drive.add(1, PROMPT, params, sibling_ids=(2, 3), beam=BeamParams(), timeout_s=1.0)
    for _ in range(4):
        drive.step()
    drive.now += 2.0
    drive.run()
    assert {drive.reason(each) for each in (1, 2, 3)} == {FinishReason.TIMEOUT}
    assert [len(drive.tokens[each]) for each in (1, 2, 3)] == [4, 4, 4]


ENDS: dict[str, Callable[[EngineDrive], None]] = {
    "length": lambda drive: drive.run(),
    "abort of the first": lambda drive: drive.abort(1),
    "abort of another": lambda drive: drive.abort(3),
    "timeout": lambda drive: setattr(drive, "now", drive.now + 100.0),
    "error": lambda drive: drive.runner.failing.add(1),
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("num_steps", [0, 1, 4])
def test_a_search_counts_what_its_client_observes_however_it_ends(end: str, num_steps: int) -> None:
    drive, observations = EngineDrive(), Observations()
    params, beam = SamplingParams(max_tokens=6), BeamParams()
    request = EngineRequest(
        sequence_id=1, prompt_token_ids=PROMPT, params=params, sibling_ids=(2, 3), beam=beam
    )
    observations.begin([request], 3)
    drive.add(1, PROMPT, params, sibling_ids=(2, 3), beam=beam, timeout_s=10.0, tenant="acme")
    for _ in range(num_steps):
        drive.step()
    ENDS[end](drive)
    drive.run()
    observations.take_outputs(drive.finals.values())
    (ended,) = observations.take().ended
    num_kept = {"length": 6, "error": 0}.get(end, num_steps)
    assert ended.num_output_tokens == 3 * num_kept
    assert ended.has_begun is (num_steps > 0 or end == "length")
    expected = (len(PROMPT) if ended.has_begun else 0, ended.num_output_tokens)
    stats = drive.engine.stats()
    assert (stats.total_prompt_tokens, stats.total_generation_tokens) == expected
    (usage,) = drive.engine.usages()
    assert usage.tenant == tenant_label("acme")
    assert (usage.num_prompt_tokens, usage.num_output_tokens) == expected


def test_a_search_that_is_preempted_counts_its_prompt_once() -> None:
    drive = EngineDrive()
    drive.add(1, PROMPT, SamplingParams(max_tokens=6), sibling_ids=(2, 3), beam=BeamParams())
    for _ in range(3):
        drive.step()
    for each in drive.scheduler.running[::-1]:
        drive.scheduler._preempt(each)
    drive.run()
    stats = drive.engine.stats()
    assert stats.total_preemptions > 0
    assert (stats.total_prompt_tokens, stats.total_generation_tokens) == (len(PROMPT), 18)


def test_a_deadline_in_the_queue_is_an_error_for_each() -> None:
    drive = EngineDrive(max_num_seqs=2)
    drive.add(9, PROMPT, SamplingParams(max_tokens=50))
    drive.add(8, PROMPT, SamplingParams(max_tokens=50))
    drive.add(11, PROMPT, SamplingParams(max_tokens=5), sibling_ids=(12,), beam=BeamParams(), timeout_s=1.0)
    drive.step()
    drive.now += 2.0
    drive.step()
    assert {drive.finals[each].error_status for each in (11, 12)} == {"UNAVAILABLE"}


def test_results_that_do_not_exist_are_empty_and_worse_than_any_other() -> None:
    drive = EngineDrive()
    params = SamplingParams(max_tokens=6, allowed_token_ids=(5,), num_log_probs=0)
    drive.add(1, PROMPT, params, sibling_ids=(2, 3, 4), beam=BeamParams(stops_early=True))
    drive.run()
    assert [drive.tokens[each] for each in (1, 2, 3, 4)] == [[5] * 6, [], [], []]
    assert drive.finals[1].cum_log_prob > -100
    assert [drive.finals[each].cum_log_prob for each in (2, 3, 4)] == [-1e9] * 3


def test_a_search_that_comes_to_a_dead_end_is_an_error_for_each() -> None:
    drive = EngineDrive()
    # The only id that is allowed is excluded, so no token is possible.
    params = SamplingParams(max_tokens=6, allowed_token_ids=(5,), bad_words=((5,),))
    drive.add(1, PROMPT, params, sibling_ids=(2,), beam=BeamParams())
    drive.run()
    assert {drive.finals[each].error_status for each in (1, 2)} == {"INVALID_ARG"}
    assert "no token is possible" in drive.finals[2].error_message
    assert drive.finals[1].timings is not None
    assert drive.finals[1].timings.first_token_s > 0
    assert drive.engine.stats().total_prompt_tokens == len(PROMPT)
    assert drive.engine.stats().num_used_blocks == 0


def test_text_is_cut_at_a_stop_string() -> None:
    params = SamplingParams(max_tokens=6)
    expected = outputs_of(expected_beams(PROMPT, params, 2, BeamParams()))
    text = b"".join(TABLE.visible_bytes(token_id, False) for token_id in expected[0]).decode()
    drive = EngineDrive(text_state=lambda context: TextStream(TABLE, context))
    drive.add(1, PROMPT, params, TextContext(stop_strings=(text[3:6],)), sibling_ids=(2,), beam=BeamParams())
    drive.run()
    final = drive.finals[1]
    assert (final.finish_reason, final.is_cut, final.num_chars) == (FinishReason.STOP, True, 3)
    assert final.stop_reason == text[3:6]


def timed_out_search(stop_strings: tuple[str, ...]) -> tuple[RequestOutput, str]:
    """The last output of the first result after four steps, and the text of its tokens."""
    drive = EngineDrive(text_state=lambda context: TextStream(TABLE, context))
    params, context = SamplingParams(max_tokens=50), TextContext(stop_strings=stop_strings)
    drive.add(1, PROMPT, params, context, sibling_ids=(2,), beam=BeamParams(), timeout_s=1.0)
    for _ in range(4):
        drive.step()
    drive.now += 2.0
    drive.run()
    return drive.finals[1], b"".join(TABLE.visible_bytes(each, False) for each in drive.tokens[1]).decode()


def test_a_search_whose_time_is_over_says_so_even_if_its_text_is_cut() -> None:
    """What was best until then need not be the beginning of what the whole search would have found."""
    whole, text = timed_out_search(())
    assert (whole.is_cut, whole.finish_reason) == (False, FinishReason.TIMEOUT)
    cut, _ = timed_out_search((text[1:3],))
    assert (cut.is_cut, cut.finish_reason, cut.stop_reason) == (True, FinishReason.TIMEOUT, "")


@pytest.mark.parametrize(
    ("width", "max_tokens", "message"),
    [(9, 3, "beam_width = 9: expected at most max_num_seqs = 8"), (8, 100, "may need 216 blocks")],
)
def test_searches_that_can_never_fit_are_refused(width: int, max_tokens: int, message: str) -> None:
    drive = EngineDrive()
    params = SamplingParams(max_tokens=max_tokens)
    with pytest.raises(InvalidRequestError, match=message):
        drive.add(1, PROMPT, params, sibling_ids=tuple(range(2, 1 + width)), beam=BeamParams())


def test_two_tenants_searches_do_not_take_slots_from_each_other_for_ever() -> None:
    drive = EngineDrive(num_blocks=32, max_num_seqs=2, budget=4)
    beam = BeamParams()
    drive.add(1, [1, 2, 3, 4, 5, 6], SamplingParams(max_tokens=8), sibling_ids=(2,), beam=beam)
    drive.add(3, [7, 8, 9], SamplingParams(max_tokens=8), sibling_ids=(4,), beam=beam, cache_salt="other")
    drive.run(max_steps=500)
    assert {drive.reason(each) for each in (1, 2, 3, 4)} <= {FinishReason.STOP, FinishReason.LENGTH}


@pytest.mark.parametrize(("max_num_seqs", "num_preemptions"), [(4, 0), (8, 1)])
def test_the_first_search_keeps_its_slots_and_blocks_until_it_ends(
    max_num_seqs: int, num_preemptions: int
) -> None:
    """A beam that gave way would be computed again, and the others would wait for it."""
    drive = EngineDrive(num_blocks=16, max_num_seqs=max_num_seqs)
    params = SamplingParams(max_tokens=10)
    drive.add(1, PROMPT, params, sibling_ids=(2, 3, 4), beam=BeamParams())
    for _ in range(3):
        drive.step()
    assert len(drive.scheduler.running) == 4
    drive.add(9, [3] * 30, SamplingParams(max_tokens=20), cache_salt="other")
    while 1 not in drive.finals:
        drive.step()
        live = [*drive.scheduler.running, *drive.scheduler.waiting]
        assert sum(each.num_preemptions for each in live if each.params.num_candidates) == 0
    assert drive.scheduler.num_preemptions == num_preemptions
    drive.run()
    assert drive.tokens[9] == solo_tokens([3] * 30, 20)
