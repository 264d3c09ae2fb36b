"""Requested details besides tokens; several sequences of one request; prefix cache hits."""

from __future__ import annotations

import pytest

from helpers.engine_drive import EngineDrive, solo_tokens
from naiad.kv_cache.prefix_cache import PrefixCache
from naiad.outputs import RequestOutput
from naiad.sampling.noise import sibling_seed
from naiad.sequence import BeamParams, FinishReason, SamplingParams, TextContext
from naiad.tokenization.text_stream import TextStream
from naiad.tokenization.token_table import TokenTable

PROMPT = [7, 8, 9, 10, 11]
TABLE = TokenTable([bytes([97 + n % 26, 65 + n // 26]) for n in range(50)], {}, frozenset())


def run(drive: EngineDrive) -> list[RequestOutput]:
    """All outputs except those that only report a start."""
    outputs = []
    while drive.engine.has_work:
        outputs += [output for output in drive.step() if not output.only_started]
    return outputs


def log_probs_of(output: RequestOutput) -> list[float]:
    return [details.log_prob for details in output.log_probs]


def test_each_new_token_has_its_log_prob_and_the_sum_grows() -> None:
    drive = EngineDrive()
    drive.add(1, PROMPT, SamplingParams(max_tokens=3, num_log_probs=0))
    outputs = run(drive)
    assert [log_probs_of(output) for output in outputs] == [[-5.0], [-6.0], [-7.0]]
    assert [output.cum_log_prob for output in outputs] == [-5.0, -11.0, -18.0]


def test_log_probs_and_logits_wait_with_the_tokens_held_back() -> None:
    drive = EngineDrive(text_state=lambda context: TextStream(TABLE, context))
    expected = solo_tokens(PROMPT, 4)
    text = b"".join(TABLE.visible_bytes(token_id, False) for token_id in expected).decode()
    params = SamplingParams(max_tokens=4, num_log_probs=0, returns_generation_logits=True)
    drive.add(1, PROMPT, params, TextContext(stop_strings=(text[2:] + "never",)))
    outputs = run(drive)
    assert [output.token_ids for output in outputs] == [expected[:1], expected[1:]]
    assert [log_probs_of(output) for output in outputs] == [[-5.0], [-6.0, -7.0, -8.0]]
    assert [output.generation_logits for output in outputs] == [[b"\5"], [b"\6", b"\7", b"\10"]]


def test_a_stop_id_leaves_no_log_prob_behind() -> None:
    drive = EngineDrive()
    expected = solo_tokens(PROMPT, 2)
    drive.add(1, PROMPT, SamplingParams(max_tokens=9, num_log_probs=0, stop_token_ids=(expected[1],)))
    outputs = run(drive)
    assert [log_probs_of(output) for output in outputs] == [[-5.0], []]
    assert outputs[-1].cum_log_prob == -5.0


def test_context_logits_come_whole_with_the_first_output() -> None:
    drive = EngineDrive(budget=2)
    drive.add(1, PROMPT, SamplingParams(max_tokens=2, returns_context_logits=True))
    outputs = run(drive)
    assert [output.context_logits for output in outputs] == [bytes(range(5)), b""]


def test_context_logits_are_whole_although_the_prompt_is_cached() -> None:
    drive = EngineDrive(prefix_cache=PrefixCache(4))
    drive.add(1, PROMPT)
    run(drive)
    drive.add(2, PROMPT, SamplingParams(max_tokens=1, returns_context_logits=True))
    (output,) = run(drive)
    assert output.context_logits == bytes(range(5))
    assert output.num_cached_tokens == 0


def test_context_logits_are_whole_after_a_preemption_in_the_prompt() -> None:
    drive = EngineDrive(num_blocks=6, budget=3)
    drive.add(1, [1] * 11, SamplingParams(max_tokens=9))
    drive.add(2, [2] * 11, SamplingParams(max_tokens=1, returns_context_logits=True))
    outputs = run(drive)
    assert drive.engine.stats().total_preemptions > 0
    assert [output.context_logits for output in outputs if output.sequence_id == 2] == [bytes(range(11))]


def test_prompt_tokens_from_the_cache_are_counted() -> None:
    drive = EngineDrive(prefix_cache=PrefixCache(4))
    drive.add(1, PROMPT)
    run(drive)
    drive.add(2, PROMPT)
    run(drive)
    assert (drive.finals[1].num_cached_tokens, drive.finals[2].num_cached_tokens) == (0, 4)
    stats = drive.engine.stats()
    assert (stats.total_queried_tokens, stats.total_hit_tokens) == (10, 4)


def test_what_a_preempted_sequence_finds_in_the_cache_is_not_counted() -> None:
    drive = EngineDrive(num_blocks=6, prefix_cache=PrefixCache(4))
    for sequence_id in (1, 2):
        drive.add(sequence_id, [sequence_id] * 9, SamplingParams(max_tokens=9))
    drive.run()
    stats = drive.engine.stats()
    assert stats.total_preemptions > 0
    assert (stats.total_queried_tokens, stats.total_hit_tokens) == (18, 0)


def test_a_thousand_common_tokens_are_computed_once_for_32() -> None:
    drive = EngineDrive(
        num_blocks=200, block_size=16, max_num_seqs=32, budget=64, prefix_cache=PrefixCache(16)
    )
    common = [n % 50 for n in range(1000)]
    for number in range(32):
        drive.add(number, [*common, number, number], SamplingParams(max_tokens=2))
    drive.run()
    assert {n: drive.tokens[n] for n in range(32)} == {n: solo_tokens([*common, n, n], 2) for n in range(32)}
    num_computed = sum(num_tokens for step in drive.runner.steps for _, num_tokens in step)
    # The rest of the last common block, the two own tokens, and one new token each.
    assert num_computed <= 1002 + 1 + 31 * (1000 % 16 + 2 + 1)


def test_siblings_share_the_prompt_and_end_on_their_own() -> None:
    drive = EngineDrive()
    expected = solo_tokens(PROMPT, 4)
    drive.add(1, PROMPT, SamplingParams(max_tokens=4), sibling_ids=(2, 3))
    drive.step()
    drive.abort(2)
    drive.run()
    assert drive.tokens[1] == drive.tokens[3] == expected
    assert drive.reason(2) is FinishReason.CANCELLED
    assert drive.runner.steps[0] == [(1, 5)]
    assert drive.runner.steps[1] == [(1, 1), (3, 1)]


def test_siblings_have_noise_of_their_own() -> None:
    seeds = {sibling_seed(seed, index) for seed in range(100) for index in range(16)}
    assert len(seeds) == 1600
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert sibling_seed(77, 0) == 77


@pytest.mark.parametrize("beam", [None, BeamParams()])
def test_a_fork_is_no_cache_hit(beam: BeamParams | None) -> None:
    drive = EngineDrive(prefix_cache=PrefixCache(4))
    ids = (1, 2, 3, 4)
    drive.add(1, [5] * 9, SamplingParams(max_tokens=3), sibling_ids=ids[1:], beam=beam)
    drive.run()
    assert [drive.finals[each].num_cached_tokens for each in ids] == [0, 0, 0, 0]
    ids = (11, 12, 13, 14)
    drive.add(11, [5] * 9, SamplingParams(max_tokens=3), sibling_ids=ids[1:], beam=beam)
    drive.run()
    assert [drive.finals[each].num_cached_tokens for each in ids] == [8, 8, 8, 8]


def test_the_best_beam_may_be_a_fork() -> None:
    for token_id in range(8):
        drive = EngineDrive()
        drive.add(1, [token_id] * 3, SamplingParams(max_tokens=4), sibling_ids=(2, 3, 4), beam=BeamParams())
        drive.run()
        assert [drive.finals[each].num_cached_tokens for each in (1, 2, 3, 4)] == [0, 0, 0, 0]


def test_siblings_that_come_after_the_first_has_ended_report_what_it_had() -> None:
    drive = EngineDrive(prefix_cache=PrefixCache(4), max_num_seqs=1)
    drive.add(1, [5] * 9, SamplingParams(max_tokens=3), sibling_ids=(2,))
    drive.run()
    assert [drive.finals[each].num_cached_tokens for each in (1, 2)] == [0, 0]
