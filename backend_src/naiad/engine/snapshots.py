"""Makes snapshots of the engine for people who watch it: between two steps, and only when somebody asks."""

from __future__ import annotations

import itertools

from naiad.engine.step_record import StepRecord
from naiad.scheduler.scheduler import Scheduler
from naiad.scheduler.tenants import Tenants
from naiad.sequence import Sequence, SequenceStatus
from naiad.snapshot import (
    MAX_ROWS,
    MAX_TENANTS,
    EngineSnapshot,
    SequenceRow,
    SequenceState,
    TenantShare,
    tenant_label,
)


def take_snapshot(scheduler: Scheduler, record: StepRecord, now_s: float) -> EngineSnapshot:
    """Describe the engine as it is now; O(sequences + blocks).

    Args:
        scheduler: between two calls; a step may be in flight.
        record: the steps of this scheduler.
        now_s: the time on the clock of `Sequence.arrival_s`.
    """
    history = record.history
    everyone = itertools.chain(scheduler.running, scheduler.waiting)
    rows = [_row(sequence, now_s) for sequence in itertools.islice(everyone, MAX_ROWS)]
    steps = history.summaries()
    prefill_rate, generation_rate = history.rates(now_s)
    num_drafts, num_accepted = history.drafts(now_s)
    return EngineSnapshot(
        stats=record.stats(scheduler),
        max_num_batched_tokens=scheduler.limits.max_num_batched_tokens,
        rows=rows,
        num_rows_left_out=len(scheduler.running) + len(scheduler.waiting) - len(rows),
        first_step=history.num_steps - len(steps),
        steps=steps,
        kv_groups=scheduler.kv_cache.block_maps(),
        tenants=_shares(scheduler.tenants),
        num_tenants=len(scheduler.tenants),
        prefill_tokens_per_s=prefill_rate,
        generation_tokens_per_s=generation_rate,
        first_token=history.first_token(now_s),
        inter_token=history.inter_token(now_s),
        num_recent_draft_tokens=num_drafts,
        num_recent_accepted_tokens=num_accepted,
    )


def _row(sequence: Sequence, now_s: float) -> SequenceRow:
    first_s = sequence.first_scheduled_s
    return SequenceRow(
        sequence_id=sequence.sequence_id,
        tenant=tenant_label(sequence.tenant),
        state=_state(sequence),
        priority=sequence.params.priority,
        num_prompt_tokens=sequence.num_prompt_tokens,
        num_computed_tokens=sequence.num_computed_tokens,
        num_output_tokens=sequence.num_output_tokens,
        max_tokens=sequence.params.max_tokens,
        num_cached_tokens=sequence.num_cached_tokens,
        num_preemptions=sequence.num_preemptions,
        wait_s=max(0.0, (first_s or now_s) - sequence.arrival_s),
        run_s=max(0.0, now_s - first_s) if first_s else 0.0,
    )


def _state(sequence: Sequence) -> SequenceState:
    if sequence.status is SequenceStatus.WAITING:
        return "paused" if sequence.num_preemptions else "waiting"
    return "prefill" if sequence.num_computed_tokens < sequence.num_prompt_tokens else "decode"


def _shares(tenants: Tenants) -> list[TenantShare]:
    busiest = sorted(tenants, key=lambda each: (-each[1].num_running, -each[1].num_live, each[0]))
    return [
        TenantShare(
            tenant_label(name),
            tenant.num_running,
            tenant.num_live - tenant.num_running,
            tenant.num_computed_tokens,
        )
        for name, tenant in busiest[:MAX_TENANTS]
    ]
