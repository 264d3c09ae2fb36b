"""What is always true of a scheduler between two steps."""

from __future__ import annotations

from collections import Counter

from naiad.kv_cache.kv_group import KVGroup
from naiad.kv_cache.prefix_cache import NO_BLOCK
from naiad.outputs import ScheduledSequence, SchedulerOutput
from naiad.scheduler.policies import rank_key
from naiad.scheduler.scheduler import Scheduler
from naiad.sequence import Sequence, SequenceStatus


def check_invariants(scheduler: Scheduler, scheduled: SchedulerOutput | None = None) -> None:
    """Assert that queues, blocks and sequences agree. O(blocks + sequences); for tests.

    Args:
        scheduler: between any two of its calls.
        scheduled: what `schedule` has just returned, to check that too.
    """
    _check_sequences(scheduler)
    _check_under_way(scheduler)
    _check_tenants(scheduler)
    rows = [*scheduler.ahead.scheduled, *(scheduled.scheduled if scheduled is not None else [])]
    _check_blocks(scheduler, {row.sequence.sequence_id: _known_end(row) for row in rows})
    _check_blocks_of_drafts(scheduler, {row.sequence.sequence_id for row in rows if row.draft_token_ids})
    if scheduled is not None:
        _check_step(scheduler, scheduled)


def _check_sequences(scheduler: Scheduler) -> None:
    everyone = [*scheduler.running, *scheduler.waiting]
    assert len({sequence.sequence_id for sequence in everyone}) == len(everyone), "a sequence is in twice"
    assert len(scheduler.running) <= scheduler.limits.max_num_seqs
    ranks = [rank_key(sequence) for sequence in scheduler.running]
    assert ranks == sorted(ranks), "those that run are not in the order of their ranks"
    assert len(scheduler.waiting) == len(list(scheduler.waiting))
    assert scheduler.waiting.num_tokens == sum(s.num_tokens for s in scheduler.waiting)
    for sequence in scheduler.running:
        assert sequence.status is SequenceStatus.RUNNING
        # A beam that waits for the others of its search misses nothing, nor does a text that is
        # foreseen to end.
        misses_nothing = sequence.params.num_candidates > 0 or _ends_next(sequence)
        assert 0 <= sequence.num_computed_tokens <= sequence.num_tokens - (not misses_nothing)
    for sequence in scheduler.waiting:
        assert sequence.status is SequenceStatus.WAITING
        assert sequence.num_computed_tokens == 0
        assert not any(sequence.block_tables), "a waiting sequence holds blocks"


def _check_under_way(scheduler: Scheduler) -> None:
    for row in scheduler.ahead.scheduled:
        assert row.sequence.status is not SequenceStatus.WAITING, "a row that is under way lost its blocks"
    for sequence in scheduler.leaving:
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


def _check_blocks(scheduler: Scheduler, ends: dict[int, int]) -> None:
    for group in scheduler.kv_cache.groups:
        _check_group(scheduler, group, ends)


def _check_group(scheduler: Scheduler, group: KVGroup, ends: dict[int, int]) -> None:
    """The pool of one group agrees with the tables that hold its blocks."""
    pool, block_size = group.pool, scheduler.kv_cache.block_size
    owners: Counter[int] = Counter()
    for sequence in [*scheduler.running, *scheduler.leaving]:
        table = sequence.block_tables[group.index]
        held = [block_id for block_id in table if block_id != NO_BLOCK]
        assert len(set(held)) == len(held), "a block is twice in a table"
        assert NO_BLOCK not in table[len(table) - len(held) :], "a block is missing in the middle of a table"
        assert len(table) * block_size >= sequence.num_computed_tokens
        assert len(table) - len(held) <= group.first_seen(sequence.num_computed_tokens), (
            "a window lacks blocks"
        )
        if group.max_held_blocks is not None:
            assert len(held) <= group.max_held_blocks, "blocks that no window sees are held"
        owners.update(held)
    for block_id in range(pool.num_blocks):
        assert pool.ref_count(block_id) == owners[block_id], f"block {block_id} is counted wrongly"
    free = pool.free_block_ids()
    assert len(free) == len(set(free)) == pool.num_free
    assert not owners.keys() & set(free), "a block is both free and held"
    assert len(free) + len(owners) == pool.num_blocks, "a block is lost"
    for sequence in scheduler.running:
        num_computed = sequence.num_computed_tokens
        num_written = max(num_computed, ends.get(sequence.sequence_id, num_computed))
        # Only full blocks are shared, from the step on that fills them; what is written later never is.
        for block_id in sequence.block_tables[group.index][num_written // block_size :]:
            assert pool.ref_count(block_id) == 1, f"block {block_id} is shared and written"


def _check_blocks_of_drafts(scheduler: Scheduler, drafting: set[int]) -> None:
    for sequence in scheduler.running:
        if sequence.sequence_id not in drafting:
            num_needed = scheduler.kv_cache.num_blocks_for(sequence.num_tokens)
            longest = max(map(len, sequence.block_tables))
            assert longest <= num_needed, "blocks for drafts were not given back"


def _check_step(scheduler: Scheduler, scheduled: SchedulerOutput) -> None:
    assert scheduled.num_scheduled_tokens <= scheduler.limits.max_num_batched_tokens
    assert scheduled.scheduled or not scheduler.has_work, "there is work but the step is empty"
    running = {sequence.sequence_id for sequence in scheduler.running}
    ids = [row.sequence.sequence_id for row in scheduled.scheduled]
    assert len(set(ids)) == len(ids), "a sequence has two rows"
    for row in scheduled.scheduled:
        sequence = row.sequence
        end = row.start + row.num_scheduled_tokens
        assert sequence.sequence_id in running
        assert row.num_scheduled_tokens >= 1
        assert row.start == sequence.num_computed_tokens
        assert row.samples == (_known_end(row) == sequence.num_tokens)
        assert row.samples or not row.draft_token_ids
        assert min(map(len, sequence.block_tables)) * scheduler.kv_cache.block_size >= end


def _known_end(row: ScheduledSequence) -> int:
    """Where the row's known tokens end: drafts may be written there again."""
    return row.start + row.num_scheduled_tokens - len(row.draft_token_ids)
