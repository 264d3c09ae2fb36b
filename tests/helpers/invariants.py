"""The invariants of a scheduler between two steps."""

from __future__ import annotations

from collections import Counter

from helpers.kv_checks import check_blocks
from naiad.kv_cache.prefix_cache import NO_BLOCK
from naiad.outputs import StepBatch
from naiad.scheduler.policies import rank_key
from naiad.scheduler.scheduler import Scheduler
from naiad.sequence import UNKNOWN_TOKEN, Sequence, SequenceStatus


def check_invariants(scheduler: Scheduler, step: StepBatch | None = None) -> None:
    """Assert that queues, blocks and sequences agree. O(blocks + sequences).

    Args:
        scheduler: the scheduler, between any two calls.
        step: the step that `schedule` has just returned, which is checked too.
    """
    _check_sequences(scheduler)
    _check_under_way(scheduler)
    _check_tenants(scheduler)
    rows = [*scheduler.projected.rows, *(step.rows if step is not None else [])]
    _check_blocks(scheduler)
    _check_blocks_of_drafts(scheduler, {row.sequence_id for row in rows if row.draft_token_ids})
    if step is not None:
        _check_step(scheduler, step)


def _check_sequences(scheduler: Scheduler) -> None:
    everyone = [*scheduler.running, *scheduler.waiting]
    assert len({sequence.sequence_id for sequence in everyone}) == len(everyone), "a sequence is in twice"
    assert scheduler.running_by_id == {sequence.sequence_id: sequence for sequence in scheduler.running}
    assert len(scheduler.running) <= scheduler.limits.max_num_seqs
    ranks = [rank_key(sequence) for sequence in scheduler.running]
    assert ranks == sorted(ranks), "those that run are not in the order of their ranks"
    assert len(scheduler.waiting) == len(list(scheduler.waiting))
    assert scheduler.waiting.num_tokens == sum(s.num_tokens for s in scheduler.waiting)
    for sequence in scheduler.running:
        assert sequence.status is SequenceStatus.RUNNING
        # A beam that waits for the other beams needs no further row, nor does a text that ends with the
        # next sampled token.
        misses_nothing = sequence.params.num_candidates > 0 or _ends_next(sequence)
        assert 0 <= sequence.num_computed_tokens <= sequence.num_tokens - (not misses_nothing)
        assert sequence.num_computed_tokens <= sequence.next_start <= sequence.next_end
        # At most two steps are under way.
        assert sequence.next_end <= sequence.num_tokens + 2
    for sequence in scheduler.waiting:
        assert sequence.status is SequenceStatus.WAITING
        assert sequence.num_computed_tokens == sequence.next_start == sequence.num_sent_blocks == 0
        assert sequence.next_end == sequence.num_tokens
        assert not any(sequence.block_tables), "a waiting sequence holds blocks"


def _check_under_way(scheduler: Scheduler) -> None:
    live = {**scheduler.running_by_id, **scheduler.leaving}
    for row in scheduler.projected.rows:
        assert row.sequence_id in live, "a row that is under way lost its blocks"
    for sequence_id, sequence in scheduler.leaving.items():
        assert sequence.sequence_id == sequence_id
        assert sequence.status is SequenceStatus.FINISHED


def _ends_next(sequence: Sequence) -> bool:
    return sequence.num_output_tokens == sequence.params.max_tokens - 1


def _check_tenants(scheduler: Scheduler) -> None:
    live = Counter(sequence.tenant for sequence in [*scheduler.running, *scheduler.waiting])
    running = Counter(sequence.tenant for sequence in scheduler.running)
    assert len(scheduler.tenants) == len(live), "a tenant without sequences is remembered"
    for sequence in [*scheduler.running, *scheduler.waiting]:
        tenant = scheduler.tenants.of(sequence)
        assert tenant.num_live == live[sequence.tenant]
        assert tenant.num_running == running[sequence.tenant]


def _check_blocks(scheduler: Scheduler) -> None:
    running = scheduler.running
    num_written = {each.sequence_id: max(each.num_computed_tokens, each.num_sent_tokens) for each in running}
    check_blocks(scheduler.kv_cache, [*running, *scheduler.leaving.values()], num_written)
    for group in scheduler.kv_cache.groups:
        if group.max_held_blocks is None:
            continue
        for sequence in running:
            # While a step is under way, the sequence holds its tokens' blocks and those of the next step.
            num_under_way = sequence.next_start - sequence.num_computed_tokens
            most = group.max_held_blocks + scheduler.kv_cache.num_blocks_for(num_under_way)
            held = [block_id for block_id in sequence.block_tables[group.index] if block_id != NO_BLOCK]
            assert len(held) <= most, "blocks that no window sees are held"


def _check_blocks_of_drafts(scheduler: Scheduler, drafting: set[int]) -> None:
    for sequence in scheduler.running:
        if sequence.sequence_id not in drafting:
            # While a step is under way, the sequence may hold the blocks of the next step.
            num_tokens = sequence.next_end if scheduler.projected.rows else sequence.num_tokens
            num_needed = scheduler.kv_cache.num_blocks_for(num_tokens)
            longest = max(map(len, sequence.block_tables))
            assert longest <= num_needed, "blocks for drafts were not given back"


def _check_step(scheduler: Scheduler, step: StepBatch) -> None:
    assert step.num_scheduled_tokens <= scheduler.limits.max_num_batched_tokens
    assert step.rows or not scheduler.has_work, "there is work but the step is empty"
    ids = [row.sequence_id for row in step.rows]
    assert len(set(ids)) == len(ids), "a sequence has two rows"
    for row in step.rows:
        sequence = scheduler.running_by_id[row.sequence_id]
        assert row.num_scheduled_tokens >= 1
        assert row.known_end == sequence.next_start == sequence.num_sent_tokens
        known = [*sequence.token_ids, UNKNOWN_TOKEN]
        assert row.token_ids == known[row.start : row.known_end]
        assert step.is_projected or row.token_ids[-1] != UNKNOWN_TOKEN
        assert step.is_projected or row.start == sequence.num_computed_tokens
        assert row.samples == (row.known_end >= sequence.num_tokens)
        assert row.samples or not row.draft_token_ids
        assert min(map(len, sequence.block_tables)) * scheduler.kv_cache.block_size >= row.end
