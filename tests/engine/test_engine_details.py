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


@pytest.mark.parametrize("is_aborted", [True, False])
def test_an_early_end_in_the_prompt_sends_no_context_logits(is_aborted: bool) -> None:
    """Those of a part of the prompt have no shape that a client could read."""
    drive = EngineDrive(budget=2)
    drive.add(1, PROMPT, SamplingParams(max_tokens=2, returns_context_logits=True), timeout_s=1.0)
    drive.step()
    if is_aborted:
        drive.abort(1)
    else:
        drive.now += 2.0
        drive.step()
    assert drive.reason(1) is (FinishReason.CANCELLED if is_aborted else FinishReason.TIMEOUT)
    assert drive.finals[1].context_logits == b""


ASKING = SamplingParams(max_tokens=2, num_prompt_log_probs=1)


def prompt_log_probs_of(outputs: list[RequestOutput], sequence_id: int) -> list[tuple[float, list[int]]]:
    """Position and id of each prompt token that is described; all of them are in one output."""
    (found,) = [
        output.prompt_log_probs
        for output in outputs
        if output.sequence_id == sequence_id and output.prompt_log_probs
    ]
    return [(-each.log_prob, each.top_token_ids) for each in found]


def described(prompt: list[int]) -> list[tuple[float, list[int]]]:
    return [(place, [token_id]) for place, token_id in enumerate(prompt)][1:]


@pytest.mark.parametrize("budget", [1, 2, 3, 4, 5, 64])
@pytest.mark.parametrize("overlaps", [False, True])
def test_prompt_log_probs_come_with_the_first_token(budget: int, overlaps: bool) -> None:
    drive = EngineDrive(budget=budget, overlaps=overlaps)
    drive.add(1, PROMPT, ASKING)
    drive.add(2, [3, 4, 5])
    outputs = run(drive)
    assert prompt_log_probs_of(outputs, 1) == described(PROMPT)
    assert outputs[0].prompt_log_probs
    assert drive.tokens == {1: solo_tokens(PROMPT, 2), 2: solo_tokens([3, 4, 5], 5)}


def test_a_prompt_of_one_token_has_no_log_probs() -> None:
    drive = EngineDrive()
    drive.add(1, [7], ASKING)
    assert [output.prompt_log_probs for output in run(drive)] == [[], []]


def test_prompt_log_probs_are_whole_although_the_prompt_is_cached() -> None:
    drive = EngineDrive(prefix_cache=PrefixCache(4))
    drive.add(1, PROMPT)
    run(drive)
    drive.add(2, PROMPT, ASKING)
    outputs = run(drive)
    assert prompt_log_probs_of(outputs, 2) == described(PROMPT)
    assert outputs[-1].num_cached_tokens == 0


def test_who_asks_for_prompt_log_probs_fills_the_cache() -> None:
    drive = EngineDrive(prefix_cache=PrefixCache(4))
    drive.add(1, PROMPT, ASKING)
    run(drive)
    drive.add(2, PROMPT)
    assert run(drive)[-1].num_cached_tokens == 4


@pytest.mark.parametrize(
    ("num_blocks", "max_tokens", "budget"), [(6, 1, 2), (6, 1, 3), (6, 9, 2), (6, 9, 5), (7, 9, 3), (9, 9, 5)]
)
def test_prompt_log_probs_are_whole_and_sent_once_with_preemptions(
    num_blocks: int, max_tokens: int, budget: int
) -> None:
    drive = EngineDrive(num_blocks=num_blocks, budget=budget, prefix_cache=PrefixCache(4))
    prompts = {1: list(range(11)), 2: list(range(20, 31)), 3: list(range(11))}
    for sequence_id, prompt in prompts.items():
        tokens = 9 if sequence_id == 1 else max_tokens
        drive.add(sequence_id, prompt, SamplingParams(max_tokens=tokens, num_prompt_log_probs=1))
    outputs = run(drive)
    assert drive.engine.stats().total_preemptions > 0
    for sequence_id, prompt in prompts.items():
        assert prompt_log_probs_of(outputs, sequence_id) == described(prompt)
        assert drive.tokens[sequence_id] == solo_tokens(prompt, 9 if sequence_id == 1 else max_tokens)


def test_prompt_log_probs_do_not_wait_with_the_tokens_held_back() -> None:
    drive = EngineDrive(text_state=lambda context: TextStream(TABLE, context))
    expected = solo_tokens(PROMPT, 2)
    text = b"".join(TABLE.visible_bytes(token_id, False) for token_id in expected).decode()
    drive.add(1, PROMPT, ASKING, TextContext(stop_strings=(text + "never",)))
    outputs = run(drive)
    assert [output.token_ids for output in outputs] == [[], expected]
    assert [len(output.prompt_log_probs) for output in outputs] == [4, 0]


def test_the_first_of_several_sequences_has_the_prompt_log_probs_before_the_others_begin() -> None:
    drive = EngineDrive(budget=2)
    drive.add(1, PROMPT, ASKING, sibling_ids=(2, 3))
    outputs = run(drive)
    assert [output.sequence_id for output in outputs if output.prompt_log_probs] == [1]
    assert outputs[0].sequence_id == 1
    assert prompt_log_probs_of(outputs, 1) == described(PROMPT)


def test_a_sequence_that_ends_in_its_prompt_has_no_prompt_log_probs() -> None:
    drive = EngineDrive(budget=2)
    drive.add(1, PROMPT, ASKING, timeout_s=1)
    drive.step()
    drive.now += 2
    (output,) = run(drive)
    assert (output.finish_reason, output.prompt_log_probs) == (FinishReason.TIMEOUT, [])


def test_the_id_that_ends_a_text_has_its_log_prob() -> None:
    drive = EngineDrive()
    expected = solo_tokens(PROMPT, 2)
    drive.add(1, PROMPT, SamplingParams(max_tokens=9, num_log_probs=0, stop_token_ids=(expected[1],)))
    first, last = run(drive)
    assert first.end_log_probs is None
    assert last.end_log_probs is not None
    assert (last.token_ids, last.end_log_probs.log_prob) == ([], -6.0)


def test_a_text_that_ends_by_its_length_has_no_log_prob_after_it() -> None:
    drive = EngineDrive()
    drive.add(1, PROMPT, SamplingParams(max_tokens=2, num_log_probs=0))
    assert [output.end_log_probs for output in run(drive)] == [None, None]


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


@pytest.mark.parametrize("has_prefix_cache", [False, True])
def test_siblings_that_gave_way_to_another_tenant_say_the_same(has_prefix_cache: bool) -> None:
    drive = EngineDrive(max_num_seqs=4, prefix_cache=PrefixCache(4) if has_prefix_cache else None)
    drive.add(1, PROMPT, SamplingParams(max_tokens=30), sibling_ids=(2, 3, 4), cache_salt="many")
    for _ in range(5):
        drive.step()
    for number in (11, 12, 13):
        drive.add(number, [number], SamplingParams(max_tokens=10), cache_salt="other")
    drive.run()
    assert drive.scheduler.num_preemptions == 2
    assert [drive.tokens[each] for each in (1, 2, 3, 4)] == [solo_tokens(PROMPT, 30)] * 4
    assert all(drive.reason(each) is FinishReason.LENGTH for each in (1, 2, 3, 4))
    assert [drive.tokens[each] for each in (11, 12, 13)] == [solo_tokens([n], 10) for n in (11, 12, 13)]


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
