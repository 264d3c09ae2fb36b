"""Steps launched before the ids of the previous one are known: the output is the same as without overlap."""

from __future__ import annotations

import pytest

from helpers.engine_drive import EngineDrive, solo_tokens
from naiad.kv_cache.prefix_cache import PrefixCache
from naiad.scheduler.policies import PriorityFirst
from naiad.sequence import BeamParams, EngineRequest, FinishReason, SamplingParams, TextContext
from naiad.tokenization.text_stream import TextStream
from naiad.tokenization.token_table import TokenTable

PROMPT = [7, 8, 9, 10, 11]
TABLE = TokenTable([bytes([97 + n % 26, 65 + n // 26]) for n in range(50)], {}, frozenset())


def make_drive(**settings: object) -> EngineDrive:
    return EngineDrive(overlaps=True, **settings)  # type: ignore[arg-type]


def rows_of(drive: EngineDrive) -> list[list[int]]:
    """The sequence ids in each step that was launched."""
    return [[sequence_id for sequence_id, _ in step] for step in drive.runner.steps]


def test_a_step_is_launched_before_the_last_ones_ids_are_known() -> None:
    drive = make_drive()
    drive.add(1, PROMPT)
    assert [output.token_ids for output in drive.step()] == [solo_tokens(PROMPT, 1)]
    assert len(drive.runner.steps) == 2
    assert len(drive.runner.under_way) == 1
    drive.run()
    assert drive.tokens[1] == solo_tokens(PROMPT, 5)
    # The prompt's step has none before it; no step follows the last token, whose place is known in advance.
    assert (len(drive.runner.steps), drive.runner.num_overlapped) == (5, 4)
    assert drive.scheduler.num_late_ends == 0


def test_prompts_join_a_step_that_is_launched_early() -> None:
    drive = make_drive(budget=4)
    drive.add(1, [1, 2], SamplingParams(max_tokens=9))
    drive.step()
    drive.add(2, [3] * 7)
    drive.run()
    assert drive.tokens == {1: solo_tokens([1, 2], 9), 2: solo_tokens([3] * 7, 5)}
    assert drive.runner.steps[2:4] == [[(1, 1), (2, 3)], [(1, 1), (2, 3)]]
    assert drive.runner.num_overlapped == len(drive.runner.steps) - 1


def test_a_stop_id_that_is_seen_a_step_late_shows_no_token_too_many() -> None:
    expected = solo_tokens([9, 9], 5)
    drive = make_drive()
    drive.add(1, [9, 9], SamplingParams(max_tokens=5, stop_token_ids=(expected[2],)))
    drive.add(2, [4])
    drive.run()
    assert (drive.tokens[1], drive.reason(1)) == (expected[:2], FinishReason.STOP)
    assert drive.tokens[2] == solo_tokens([4], 5)
    assert rows_of(drive) == [[1, 2], [1, 2], [1, 2], [1, 2], [2]]
    assert drive.scheduler.num_late_ends == 1
    assert drive.engine.stats().num_used_blocks == 0


def test_a_stop_sequence_and_a_stop_string_end_where_they_do_otherwise() -> None:
    expected = solo_tokens(PROMPT, 6)
    text = b"".join(TABLE.visible_bytes(token_id, False) for token_id in expected).decode()
    for params, context in (
        (SamplingParams(max_tokens=6, stop_sequences=(tuple(expected[1:3]),)), None),
        (SamplingParams(max_tokens=6), TextContext(stop_strings=(text[5:8],))),
    ):
        finals = []
        for overlaps in (False, True):
            drive = EngineDrive(text_state=lambda each: TextStream(TABLE, each), overlaps=overlaps)
            drive.add(1, PROMPT, params, context)
            drive.run()
            finals.append((drive.tokens[1], drive.finals[1].stop_reason, drive.finals[1].num_chars))
            assert drive.reason(1) is FinishReason.STOP
            assert drive.scheduler.num_late_ends == overlaps
        assert finals[0] == finals[1]


def test_blocks_of_a_row_under_way_are_kept_until_its_step_is_over() -> None:
    drive = make_drive()
    drive.add(1, [1] * 9, SamplingParams(max_tokens=50))
    drive.step()
    drive.abort(1)
    assert drive.reason(1) is FinishReason.CANCELLED
    assert drive.engine.stats().num_used_blocks == 3
    assert drive.engine.has_work
    assert drive.step() == []
    assert drive.engine.stats().num_used_blocks == 0
    assert not drive.engine.has_work
    assert drive.tokens[1] == solo_tokens([1] * 9, 1)


def test_an_abort_before_a_step_has_the_sequence_frees_its_blocks_at_once() -> None:
    drive = make_drive(max_num_seqs=1)
    drive.add(1, [1] * 9)
    drive.add(2, [2])
    drive.step()
    drive.abort(2)
    assert drive.scheduler.leaving == {}
    drive.run()
    assert drive.tokens[1] == solo_tokens([1] * 9, 5)


def test_a_deadline_ends_a_sequence_that_is_under_way_once() -> None:
    drive = make_drive()
    drive.add(1, [1], SamplingParams(max_tokens=50), timeout_s=1.0)
    drive.step()
    drive.step()
    drive.now += 2.0
    drive.run()
    assert drive.reason(1) is FinishReason.TIMEOUT
    assert drive.tokens[1] == solo_tokens([1], 2)
    assert drive.scheduler.num_late_ends == 1


def test_a_row_that_fails_takes_the_row_behind_it_along() -> None:
    drive = make_drive()
    drive.add(1, [1] * 5)
    drive.add(2, [2] * 5)
    drive.step()
    drive.step()
    drive.runner.failing.add(1)
    drive.run()
    assert drive.reason(1) is FinishReason.ERROR
    # Once when it fails, and once for what the step in flight at that time has written.
    assert drive.runner.cleared == [[0, 1, 4], [0, 1, 4]]
    assert drive.tokens[2] == solo_tokens([2] * 5, 5)


def test_what_a_row_leaves_that_fails_after_its_sequence_has_ended_is_cleared() -> None:
    expected = solo_tokens([1] * 5, 2)
    drive = make_drive()
    drive.add(1, [1] * 5, SamplingParams(max_tokens=9, stop_token_ids=(expected[1],)))
    drive.step()
    drive.runner.failing.add(1)
    drive.step()
    assert (drive.tokens[1], drive.reason(1)) == (expected[:1], FinishReason.STOP)
    assert drive.runner.cleared == []
    drive.run()
    assert drive.runner.cleared == [[0, 1]]
    assert drive.engine.stats().num_used_blocks == 0


@pytest.mark.parametrize(
    "asked",
    [{"repetition_penalty": 1.2}, {"num_log_probs": 0}, {"returns_generation_logits": True}],
    ids=str,
)
def test_no_step_overlaps_whose_ids_somebody_needs(asked: dict[str, float]) -> None:
    drive = make_drive()
    drive.add(1, PROMPT, SamplingParams(max_tokens=4, **asked))  # type: ignore[arg-type]
    drive.add(2, [1], SamplingParams(max_tokens=8))
    drive.run()
    assert drive.tokens == {1: solo_tokens(PROMPT, 4), 2: solo_tokens([1], 8)}
    # Only once the first sequence has ended.
    assert drive.runner.num_overlapped == 3
    assert rows_of(drive)[:4] == [[1, 2]] * 4


@pytest.mark.parametrize("num_right", [0, 1, 2, 3])
def test_steps_overlap_when_a_clients_own_draft_has_been_tried(num_right: int) -> None:
    expected = solo_tokens(PROMPT, 9)
    drive = make_drive(make_drafter=lambda *_: None)
    draft = (*expected[:num_right], *[49] * (3 - num_right))
    assert draft[num_right:] != tuple(expected[num_right:3]) or num_right == 3
    drive.engine.add_request(
        EngineRequest(
            sequence_id=1,
            prompt_token_ids=PROMPT,
            params=SamplingParams(max_tokens=9),
            draft_token_ids=draft,
        )
    )
    drive.tokens[1] = []
    drive.run()
    assert drive.tokens[1] == expected
    assert drive.engine.stats().total_accepted_tokens_at[:3] == [int(num < num_right) for num in range(3)]
    assert drive.runner.num_overlapped > 2


def test_beams_wait_for_each_other() -> None:
    results = []
    for overlaps in (False, True):
        drive = EngineDrive(overlaps=overlaps)
        drive.add(9, [3], SamplingParams(max_tokens=20))
        drive.add(1, PROMPT, SamplingParams(max_tokens=4), sibling_ids=(2, 3), beam=BeamParams())
        drive.run()
        results.append((drive.tokens, drive.finals[1].cum_log_prob))
    assert results[0] == results[1]


def test_output_survives_preemption() -> None:
    drive = make_drive(num_blocks=8, prefix_cache=PrefixCache(4))
    for sequence_id in range(1, 6):
        drive.add(
            sequence_id, [sequence_id] * 5, SamplingParams(max_tokens=20), cache_salt="ab"[sequence_id % 2]
        )
    drive.run()
    assert drive.engine.stats().total_preemptions > 0
    assert drive.runner.num_overlapped > 0
    assert drive.tokens == {n: solo_tokens([n] * 5, 20) for n in range(1, 6)}


def test_nobody_gives_way_in_a_step_that_is_launched_early() -> None:
    drive = make_drive(max_num_seqs=1, policy=PriorityFirst(aging_s=10.0))
    drive.add(1, [1], SamplingParams(max_tokens=9))
    drive.step()
    drive.add(2, [2], SamplingParams(max_tokens=2, priority=-5))
    drive.run()
    assert drive.engine.stats().total_preemptions == 1
    assert drive.tokens == {1: solo_tokens([1], 9), 2: solo_tokens([2], 2)}


def test_siblings_share_a_prompt_whose_ids_are_under_way() -> None:
    drive = make_drive()
    drive.add(1, PROMPT, SamplingParams(max_tokens=4), sibling_ids=(2, 3))
    drive.run()
    assert [drive.tokens[each] for each in (1, 2, 3)] == [solo_tokens(PROMPT, 4)] * 3
    assert rows_of(drive)[:2] == [[1], [1, 2, 3]]
    assert drive.runner.num_overlapped > 0


@pytest.mark.parametrize("num_tokens", range(1, 14))
def test_the_prefix_cache_finds_as_much_of_a_text_as_otherwise(num_tokens: int) -> None:
    found = []
    for overlaps in (False, True):
        drive = EngineDrive(prefix_cache=PrefixCache(4), overlaps=overlaps)
        stop = solo_tokens(PROMPT, 9)[8]
        drive.add(1, PROMPT, SamplingParams(max_tokens=num_tokens, stop_token_ids=(stop,)))
        drive.run()
        drive.add(2, [*PROMPT, *drive.tokens[1], 49], SamplingParams(max_tokens=1))
        drive.run()
        found.append(drive.finals[2].num_cached_tokens)
    assert found[0] == found[1]


def test_stats_count_tokens_once() -> None:
    drive = make_drive()
    expected = solo_tokens([9, 9], 3)
    drive.add(1, [9, 9], SamplingParams(max_tokens=5, stop_token_ids=(expected[2],)))
    drive.run()
    stats = drive.engine.stats()
    assert (stats.total_prompt_tokens, stats.total_generation_tokens) == (2, 2)
    assert stats.total_steps == len(drive.runner.steps)


def test_beams_that_fail_together_leave_nothing_to_others() -> None:
    drive = EngineDrive()
    drive.add(1, PROMPT, SamplingParams(max_tokens=4), sibling_ids=(2, 3), beam=BeamParams())
    drive.step()
    drive.step()
    running = {each.sequence_id: set(each.block_table) for each in drive.scheduler.running}
    drive.runner.failing.update(running)
    drive.step()
    own = [blocks for each, blocks in running.items() if each != 1]
    assert len(running) == 3
    assert {block_id for cleared in drive.runner.cleared for block_id in cleared} >= set.union(
        *own
    ) - running[1]


@pytest.mark.parametrize("num_prompt", [5, 6, 7, 8])
@pytest.mark.parametrize("num_right", [0, 1, 3])
def test_only_known_tokens_of_a_row_with_drafts_are_published(num_prompt: int, num_right: int) -> None:
    prompt = [7] * num_prompt
    expected = solo_tokens(prompt, 6)
    prefix_cache = PrefixCache(4)
    drive = make_drive(make_drafter=lambda *_: None, prefix_cache=prefix_cache)
    drive.add(1, [3], SamplingParams(max_tokens=20))
    drive.step()
    drive.engine.add_request(
        EngineRequest(
            sequence_id=2,
            prompt_token_ids=prompt,
            params=SamplingParams(max_tokens=6),
            draft_token_ids=(*expected[:num_right], *[49] * (3 - num_right)),
        )
    )
    drive.tokens[2] = []
    while not drive.tokens[2]:
        drive.step()
    assert drive.tokens[2] == expected[: num_right + 1]
    table = next(each.block_table for each in drive.scheduler.running if each.sequence_id == 2)
    # In the next step the accepted ones are published, as without overlap.
    assert [block_id for block_id in table if prefix_cache.holds(block_id)] == table[: num_prompt // 4]
    drive.run()
    assert drive.tokens[2] == expected


@pytest.mark.parametrize("overlaps", [False, True])
def test_blocks_that_only_failed_rows_share_are_cleared(overlaps: bool) -> None:
    drive = EngineDrive(prefix_cache=PrefixCache(4), overlaps=overlaps)
    # The second sequence finds the blocks that the first writes in the same step.
    for sequence_id in (1, 2):
        drive.add(sequence_id, [1] * 9)
    drive.runner.failing.update({1, 2})
    drive.run()
    assert [drive.reason(each) for each in (1, 2)] == [FinishReason.ERROR] * 2
    assert drive.runner.num_written_slots == 0
