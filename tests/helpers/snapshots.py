"""What must be true of every snapshot of an engine."""

from __future__ import annotations

from collections import Counter

from helpers.engine_drive import EngineDrive
from naiad.scheduler.scheduler import Scheduler
from naiad.snapshot import CACHED, FREE, MAX_CELLS, SHARED, USED, BlockMap, EngineSnapshot, tenant_label


def check_snapshot(drive: EngineDrive) -> EngineSnapshot:
    """Take a snapshot and compare it with the scheduler's own state. O(blocks + sequences)."""
    scheduler, snapshot = drive.scheduler, drive.engine.snapshot()
    _check_rows(scheduler, snapshot)
    _check_tenants(scheduler, snapshot)
    _check_steps(snapshot)
    cache = scheduler.kv_cache._prefix_cache
    for group, blocks in zip(scheduler.kv_cache.groups, snapshot.kv_groups, strict=True):
        held = set() if cache is None else set(cache.held_ids(group.index))
        counts = [group.pool.ref_count(each) for each in range(group.pool.num_blocks)]
        expected = [
            (FREE if each not in held else CACHED) if count == 0 else USED if count == 1 else SHARED
            for each, count in enumerate(counts)
        ]
        check_map(blocks, expected)
        assert blocks.num_free + blocks.num_cached == group.pool.num_free
        assert blocks.window == group.window
    return snapshot


def check_map(blocks: BlockMap, expected: list[int]) -> None:
    """Compare a map with the state of each block."""
    numbers = blocks.num_free, blocks.num_cached, blocks.num_used, blocks.num_shared
    assert numbers == tuple(expected.count(state) for state in (FREE, CACHED, USED, SHARED))
    width = blocks.blocks_per_cell
    assert len(blocks.cells) == -(-len(expected) // width) <= MAX_CELLS
    for index, state in enumerate(blocks.cells):
        counted = Counter(expected[index * width : (index + 1) * width])
        assert state == max(counted, key=lambda each: (counted[each], each))


def _check_rows(scheduler: Scheduler, snapshot: EngineSnapshot) -> None:
    sequences = {each.sequence_id: each for each in [*scheduler.running, *scheduler.waiting]}
    assert len(snapshot.rows) + snapshot.num_rows_left_out == len(sequences)
    states = Counter(row.state for row in snapshot.rows)
    if not snapshot.num_rows_left_out:
        assert states["prefill"] + states["decode"] == len(scheduler.running) == snapshot.stats.num_running
        assert states["waiting"] + states["paused"] == len(scheduler.waiting) == snapshot.stats.num_waiting
        assert states["paused"] == snapshot.stats.num_paused
        assert states["prefill"] == snapshot.stats.num_context_seqs
    for row in snapshot.rows:
        sequence = sequences[row.sequence_id]
        assert row.tenant == tenant_label(sequence.tenant)
        assert row.num_prompt_tokens == sequence.num_prompt_tokens
        assert row.num_computed_tokens <= row.num_prompt_tokens + row.num_output_tokens
        assert row.num_output_tokens <= row.max_tokens
        assert row.wait_s >= 0
        assert row.run_s >= 0


def _check_tenants(scheduler: Scheduler, snapshot: EngineSnapshot) -> None:
    assert snapshot.num_tenants == len(scheduler.tenants) == len(snapshot.tenants)
    assert sum(each.num_running for each in snapshot.tenants) == len(scheduler.running)
    assert sum(each.num_waiting for each in snapshot.tenants) == len(scheduler.waiting)
    assert all(each.num_tokens >= 0 for each in snapshot.tenants)


def _check_steps(snapshot: EngineSnapshot) -> None:
    stats, steps = snapshot.stats, snapshot.steps
    for step in steps:
        assert 0 <= step.num_accepted_tokens <= step.num_draft_tokens
        assert min(step.num_prefill_tokens, step.num_decode_rows, step.num_preemptions) >= 0
        assert step.num_prefill_tokens + step.num_decode_rows > 0
        assert step.duration_s >= 0
    assert snapshot.num_recent_accepted_tokens <= snapshot.num_recent_draft_tokens
    if snapshot.first_step == 0:
        assert sum(step.num_draft_tokens for step in steps) == stats.total_draft_tokens
        assert sum(step.num_accepted_tokens for step in steps) == sum(stats.total_accepted_tokens_at)
        assert sum(step.num_preemptions for step in steps) <= stats.total_preemptions
