"""Snapshots and descriptions of engines that do not run."""

from __future__ import annotations

from naiad.engine_process.protocol import Checkpoint, Ready
from naiad.openai_server.engines.snapshot_desk import NamedSnapshot
from naiad.outputs import EngineStats
from naiad.snapshot import (
    BlockMap,
    EngineSnapshot,
    Percentiles,
    SequenceRow,
    SequenceState,
    StepSummary,
    TenantShare,
    tenant_label,
)


def info(created_s: int = 100, tells_snapshots: bool = True) -> Ready:
    return Ready(
        checkpoint=Checkpoint("/m", "m"),
        created_s=created_s,
        max_model_len=64,
        vocab_size=10,
        eos_token_ids=[],
        max_num_seqs=8,
        stats=EngineStats(),
        tells_snapshots=tells_snapshots,
    )


def row(sequence_id: int, tenant: str = "", state: SequenceState = "decode") -> SequenceRow:
    return SequenceRow(sequence_id, tenant_label(tenant), state, 0, 5, 5, 2, 9, 4, 0, 0.25, 1.5)


def snapshot(*tenants: str) -> EngineSnapshot:
    """An engine that runs a sequence for each of these tenants."""
    return EngineSnapshot(
        stats=EngineStats(num_running=len(tenants), max_num_seqs=8, block_size=16),
        max_num_batched_tokens=128,
        rows=[row(number, tenant) for number, tenant in enumerate(tenants, 1)],
        num_rows_left_out=0,
        first_step=40,
        steps=[StepSummary(0.0125, 5, 4, 3, 2, 1), StepSummary(0.5, 0, 4, 0, 0, 0)],
        kv_groups=[BlockMap(None, 1, 1, 1, 1, 1, bytes(range(4)))],
        tenants=[
            TenantShare(tenant_label(each), tenants.count(each), 0, 10) for each in sorted(set(tenants))
        ],
        num_tenants=len(set(tenants)),
        generation_tokens_per_s=12.34,
        first_token=Percentiles(0.25, 0.5, 4),
    )


def seen(engine: Ready, *tenants: str) -> NamedSnapshot:
    return NamedSnapshot(engine, snapshot(*tenants), {1: "chatcmpl-1"}, 0.0)
