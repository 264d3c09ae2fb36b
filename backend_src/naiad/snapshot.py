"""What an engine is doing at one moment, for people who watch it; without prompts, texts and token ids."""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec

from naiad.outputs import EngineStats

# Larger pools are summed to this many cells.
MAX_CELLS = 2048
# More sequences and tenants than these are counted, but not listed.
MAX_ROWS = 512
MAX_TENANTS = 64

SequenceState = Literal["compiling", "waiting", "paused", "prefill", "decode"]

# A cell's state: the one in which most of its blocks are.
FREE, CACHED, USED, SHARED = range(4)

_LABEL_CHARS = 12


def tenant_label(tenant: str) -> str:
    """An opaque name of a tenant, from its name's SHA-256; empty for the tenant without a name."""
    return hashlib.sha256(tenant.encode()).hexdigest()[:_LABEL_CHARS] if tenant else ""


class SequenceRow(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A sequence that has not ended.

    Attributes:
        sequence_id: the engine's id of it.
        tenant: its tenant's label.
        state: `compiling` waits for its grammar; `waiting` has never run; `paused` waits again after a
            preemption; `prefill` still computes its prompt; `decode` has computed it.
        priority: smaller is served first.
        num_prompt_tokens: tokens of the prompt.
        num_computed_tokens: tokens of prompt and output whose KV is in the cache.
        num_output_tokens: new tokens so far.
        max_tokens: new tokens at most.
        num_cached_tokens: prompt tokens that the prefix cache had.
        num_preemptions: how often it lost its blocks.
        wait_s: seconds from its arrival to its first step, or until now.
        run_s: seconds since its first step; 0 before.
    """

    sequence_id: int
    tenant: str
    state: SequenceState
    priority: int
    num_prompt_tokens: int
    num_computed_tokens: int
    num_output_tokens: int
    max_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    wait_s: float
    run_s: float


class StepSummary(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What one step computed.

    Attributes:
        duration_s: seconds from its launch, or from the end of the step before it, to its end.
        num_prefill_tokens: prompt tokens.
        num_decode_rows: sequences that had computed their prompts before.
        num_draft_tokens: draft tokens that were tried.
        num_accepted_tokens: those of them that the model agreed with.
        num_preemptions: preemptions since the step before it.
    """

    duration_s: float
    num_prefill_tokens: int
    num_decode_rows: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_preemptions: int


class BlockMap(msgspec.Struct, array_like=True, frozen=True):
    """The blocks of one KV group by state; the four numbers add up to the pool.

    Attributes:
        window: how many tokens the group's layers attend to; None: all.
        num_free: blocks without reusable KV that no sequence holds.
        num_cached: blocks that no sequence holds and whose KV the prefix cache can reuse.
        num_used: blocks that one sequence holds.
        num_shared: blocks that several sequences hold.
        blocks_per_cell: how many neighbouring blocks each cell stands for; the last one may have fewer.
        cells: one byte a cell, at most `MAX_CELLS`: the state that most of its blocks are in; of two that are
            equally frequent the larger one.
    """

    window: int | None
    num_free: int
    num_cached: int
    num_used: int
    num_shared: int
    blocks_per_cell: int
    cells: bytes


class TenantShare(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What one tenant has of the engine.

    Attributes:
        tenant: its label.
        num_running: its sequences that run.
        num_waiting: its sequences that wait.
        num_tokens: tokens computed for it, drafts included, since it last began to have sequences.
    """

    tenant: str
    num_running: int
    num_waiting: int
    num_tokens: int


class Percentiles(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The median and the 95th percentile of `count` times, in seconds; 0 without any."""

    p50_s: float = 0.0
    p95_s: float = 0.0
    count: int = 0


class EngineSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The engine between two steps.

    Attributes:
        stats: the gauges and totals.
        max_num_batched_tokens: tokens that a step computes at most.
        rows: at most `MAX_ROWS` sequences, first those that run.
        num_rows_left_out: how many more there are.
        first_step: the number of the first of `steps`, counted from the engine's start.
        steps: the last steps, the oldest first.
        kv_groups: the blocks of each KV group.
        tenants: at most `MAX_TENANTS` tenants with sequences, first those with the most that run.
        num_tenants: how many there are.
        prefill_tokens_per_s, generation_tokens_per_s: over the last seconds.
        first_token: times from arrival to the first token, over the last half minute.
        inter_token: times between two tokens of a sequence, over the last half minute or the steps that are
            remembered of it.
        num_recent_draft_tokens, num_recent_accepted_tokens: over the same steps.
    """

    stats: EngineStats
    max_num_batched_tokens: int = 0
    rows: list[SequenceRow] = []
    num_rows_left_out: int = 0
    first_step: int = 0
    steps: list[StepSummary] = []
    kv_groups: list[BlockMap] = []
    tenants: list[TenantShare] = []
    num_tenants: int = 0
    prefill_tokens_per_s: float = 0.0
    generation_tokens_per_s: float = 0.0
    first_token: Percentiles = Percentiles()
    inter_token: Percentiles = Percentiles()
    num_recent_draft_tokens: int = 0
    num_recent_accepted_tokens: int = 0
