from __future__ import annotations

import pytest

from helpers.engine_drive import EngineDrive, solo_tokens
from naiad.errors import InvalidRequestError
from naiad.kv_cache.prefix_cache import PrefixCache
from naiad.sequence import FinishReason, SamplingParams


def test_output_is_what_the_model_says() -> None:
    drive = EngineDrive()
    drive.add(1, [3, 4, 5])
    drive.run()
    assert drive.tokens[1] == solo_tokens([3, 4, 5], 5)
    assert drive.reason(1) is FinishReason.LENGTH


@pytest.mark.parametrize("budget", [*range(1, 18), 33, 64])
def test_output_does_not_depend_on_the_token_budget(budget: int) -> None:
    drive = EngineDrive(budget=budget)
    prompts = {sequence_id: list(range(sequence_id, sequence_id + 17)) for sequence_id in range(1, 6)}
    for sequence_id, prompt in prompts.items():
        drive.add(sequence_id, prompt)
    drive.run()
    assert drive.tokens == {sequence_id: solo_tokens(prompt, 5) for sequence_id, prompt in prompts.items()}


def test_output_survives_preemption() -> None:
    drive = EngineDrive(num_blocks=8)
    params = SamplingParams(max_tokens=20)
    for sequence_id in range(1, 6):
        drive.add(sequence_id, [sequence_id] * 5, params)
    drive.run()
    assert drive.engine.stats().total_preemptions > 0
    assert drive.tokens == {n: solo_tokens([n] * 5, 20) for n in range(1, 6)}


def test_sequences_join_a_running_batch() -> None:
    drive = EngineDrive()
    drive.add(1, [1, 2])
    drive.step()
    drive.add(2, [3, 4])
    drive.step()
    assert drive.runner.steps[1] == [(1, 1), (2, 2)]


def test_a_tenant_is_who_the_request_says_and_shares_blocks_within_a_salt_only() -> None:
    drive = EngineDrive(prefix_cache=PrefixCache(4))
    seen = []
    for sequence_id, (salt, tenant) in enumerate([("a", None), ("b", "key"), ("c", "key"), ("c", "key")], 1):
        drive.add(sequence_id, [7] * 9, cache_salt=salt, tenant=tenant)
        while sequence_id not in drive.scheduler.running_by_id:
            drive.step()
        sequence = drive.scheduler.running_by_id[sequence_id]
        seen.append((sequence.tenant, sequence.num_cached_tokens))
        drive.run()
    assert seen == [("a", 0), ("key", 0), ("key", 0), ("key", 8)]


def test_stop_id_ends_and_is_not_sent() -> None:
    expected = solo_tokens([9, 9], 5)
    drive = EngineDrive()
    drive.add(1, [9, 9], SamplingParams(max_tokens=5, stop_token_ids=(expected[2],)))
    drive.run()
    assert drive.tokens[1] == expected[:2]
    assert drive.reason(1) is FinishReason.STOP
    assert drive.finals[1].stop_reason == str(expected[2])


def test_sequence_ends_at_max_model_len() -> None:
    drive = EngineDrive(num_blocks=2, block_size=4)
    assert drive.engine.max_model_len == 8
    drive.add(1, [1] * 5, SamplingParams(max_tokens=100))
    drive.run()
    assert drive.tokens[1] == solo_tokens([1] * 5, 3)
    assert drive.reason(1) is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("prompt", "words"), [([], "empty"), ([1] * 8, "8 tokens"), ([50], "token id 50"), ([-3], "token id -3")]
)
def test_refused_request_leaves_nothing_behind(prompt: list[int], words: str) -> None:
    drive = EngineDrive(num_blocks=2)
    with pytest.raises(InvalidRequestError, match=words):
        drive.add(1, prompt)
    assert not drive.engine.has_work
    drive.add(1, [1])


@pytest.mark.parametrize("bad_words", [((),), ((5,), ())])
def test_a_bad_word_without_ids_is_refused_before_it_can_end_others(
    bad_words: tuple[tuple[int, ...], ...],
) -> None:
    drive = EngineDrive()
    drive.add(1, [1])
    with pytest.raises(InvalidRequestError, match="bad_words has an empty entry"):
        drive.add(2, [2], SamplingParams(max_tokens=5, bad_words=bad_words))
    drive.run()
    assert drive.tokens == {1: solo_tokens([1], 5)}


def test_abort_of_a_running_sequence_frees_its_blocks_at_once() -> None:
    drive = EngineDrive()
    drive.add(1, [1] * 9)
    drive.step()
    assert drive.engine.stats().num_used_blocks == 3
    drive.abort(1)
    assert drive.reason(1) is FinishReason.CANCELLED
    assert drive.engine.stats().num_used_blocks == 0
    assert not drive.engine.has_work


def test_abort_of_a_waiting_sequence() -> None:
    drive = EngineDrive(max_num_seqs=1)
    drive.add(1, [1])
    drive.add(2, [2])
    drive.step()
    drive.abort(2)
    drive.run()
    assert drive.reason(2) is FinishReason.CANCELLED
    assert [steps for steps in drive.runner.steps if any(row[0] == 2 for row in steps)] == []


def test_abort_of_an_unknown_sequence_is_nothing() -> None:
    assert EngineDrive().engine.abort(77) is None


def test_failed_row_ends_alone_and_its_blocks_are_cleared_before_they_are_free() -> None:
    drive = EngineDrive()
    drive.add(1, [1] * 5)
    drive.add(2, [2] * 5)
    drive.step()
    drive.runner.failing.add(1)
    drive.run()
    final = drive.finals[1]
    assert (final.finish_reason, final.error_status, final.error_message) == (
        FinishReason.ERROR,
        "INTERNAL",
        "the row failed",
    )
    assert drive.runner.cleared == [[0, 1]]
    assert drive.tokens[2] == solo_tokens([2] * 5, 5)


def test_row_may_fail_before_it_samples() -> None:
    drive = EngineDrive(budget=4)
    drive.runner.failing.add(1)
    drive.add(1, [1] * 9)
    drive.step()
    assert drive.reason(1) is FinishReason.ERROR


def test_deadline_in_the_queue_says_so_and_nothing_ran() -> None:
    drive = EngineDrive(max_num_seqs=1)
    drive.add(1, [1], SamplingParams(max_tokens=50))
    drive.add(2, [2], timeout_s=1.0)
    drive.step()
    drive.now += 2.0
    drive.step()
    final = drive.finals[2]
    assert (final.finish_reason, final.error_status) == (FinishReason.TIMEOUT, "UNAVAILABLE")
    assert final.error_message.startswith("timeout")
    assert all(row[0] != 2 for step in drive.runner.steps for row in step)


def test_deadline_while_running_ends_with_timeout() -> None:
    drive = EngineDrive()
    drive.add(1, [1], SamplingParams(max_tokens=50), timeout_s=1.0)
    drive.step()
    drive.step()
    drive.now += 2.0
    drive.step()
    assert drive.reason(1) is FinishReason.TIMEOUT
    assert drive.tokens[1] == solo_tokens([1], 2)


def test_deadline_of_an_ended_sequence_is_ignored() -> None:
    drive = EngineDrive()
    drive.add(1, [1], timeout_s=1.0)
    drive.run()
    drive.now += 2.0
    assert drive.step() == []


def test_stats_count_tokens_once_despite_preemption() -> None:
    drive = EngineDrive(num_blocks=8)
    for sequence_id in range(1, 6):
        drive.add(sequence_id, [sequence_id] * 5, SamplingParams(max_tokens=20))
    drive.run()
    stats = drive.engine.stats()
    assert (stats.total_prompt_tokens, stats.total_generation_tokens) == (25, 100)
    assert stats.total_steps == len(drive.runner.steps)


def test_stats_are_the_gauges_of_now() -> None:
    drive = EngineDrive(max_num_seqs=2, budget=4)
    drive.add(1, [1])
    drive.add(2, [2] * 9)
    drive.add(3, [3])
    drive.step()
    stats = drive.engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_context_seqs) == (2, 1, 1)
    assert (stats.num_blocks, stats.num_used_blocks, stats.block_size, stats.max_num_seqs) == (64, 4, 4, 2)


def test_the_nearest_deadline_comes_first_whatever_the_order_of_arrival() -> None:
    drive = EngineDrive()
    for sequence_id, timeout_s in ((1, 1.0), (2, 9.0), (3, 5.0)):
        drive.add(sequence_id, [sequence_id], SamplingParams(max_tokens=50), timeout_s=timeout_s)
    drive.step()
    ended = []
    for now in (2.0, 6.0, 10.0):
        drive.now = now
        drive.step()
        ended.append(sorted(drive.finals))
    assert ended == [[1], [1, 3], [1, 2, 3]]


@pytest.mark.parametrize("timeout_s", [1e-6, 0.25, 31536000.0])
def test_a_deadline_in_the_queue_names_no_time(timeout_s: float) -> None:
    """The engine has only what was left of the client's."""
    drive = EngineDrive(max_num_seqs=1)
    drive.now = 54321.987
    drive.add(1, [1], timeout_s=timeout_s)
    drive.now += 1e9
    drive.step()
    assert drive.finals[1].error_message == "timeout: the request was not started within its time limit"
