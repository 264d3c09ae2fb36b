"""What `/engine/snapshot` and `/engine/events` tell of an engine. Prompts and texts are in none of it."""

from __future__ import annotations

import time
from collections.abc import Mapping

import msgspec

from naiad.engine_process import Ready
from naiad.snapshot import (
    BlockMap,
    EngineSnapshot,
    Percentiles,
    SequenceRow,
    StepSummary,
    TenantShare,
    tenant_label,
)

_MAX_ID_CHARS = 80


class RequestView(msgspec.Struct, kw_only=True):
    """A sequence that runs or waits.

    Attributes:
        id: for requests of this server the answer's id, with `/1`, `/2` … for further choices; for those of
            other frontends `#` and the engine's number.
        tenant: an opaque label; empty for the tenant without a name.
        state: `compiling` (waits for its grammar), `waiting`, `paused` (waits again after a preemption),
            `prefill` or `decode`.
        priority: smaller is served first.
        computed_tokens: tokens of prompt and output whose KV is in the cache.
        output_tokens: new tokens so far, `max_tokens` at most.
        cached_tokens: prompt tokens that the prefix cache had.
        wait_s: seconds from the arrival to the first step, or until now.
        run_s: seconds since the first step; 0 before.
    """

    id: str
    tenant: str
    state: str
    priority: int
    prompt_tokens: int
    computed_tokens: int
    output_tokens: int
    max_tokens: int
    cached_tokens: int
    preemptions: int
    wait_s: float
    run_s: float


class StepsView(msgspec.Struct, kw_only=True):
    """The last steps, the oldest first: lists of equal lengths.

    Attributes:
        first: the number of the first one, counted from the engine's start.
        ms: duration in milliseconds.
        prefill_tokens: prompt tokens computed.
        decode_rows: sequences that got their next token.
        draft_tokens: draft tokens tried for them.
        accepted_tokens: those that the model agreed with.
        preemptions: sequences that lost their blocks before the step.
    """

    first: int
    ms: list[float]
    prefill_tokens: list[int]
    decode_rows: list[int]
    draft_tokens: list[int]
    accepted_tokens: list[int]
    preemptions: list[int]


class BlocksView(msgspec.Struct, kw_only=True):
    """The KV blocks of one group of layers by state.

    Attributes:
        window: how many tokens the layers attend to; null: all.
        free: blocks without reusable KV that nobody holds.
        cached: blocks that nobody holds and that the prefix cache can reuse.
        used: blocks that one sequence holds.
        shared: blocks that several sequences hold.
        blocks_per_cell: how many neighbouring blocks a cell stands for.
        cells: base64 of one byte a cell, 2,048 at most: 0 free, 1 cached, 2 used, 3 shared; of several blocks
            the state that most of them are in.
    """

    window: int | None
    free: int
    cached: int
    used: int
    shared: int
    blocks_per_cell: int
    cells: bytes


class LatencyView(msgspec.Struct, kw_only=True):
    """Percentiles of the last half minute in milliseconds, of `count` times; null without any."""

    p50_ms: float | None
    p95_ms: float | None
    count: int


class TenantView(msgspec.Struct, kw_only=True):
    """A tenant with sequences; `tokens` were computed for it since it last began to have any."""

    tenant: str
    running: int
    waiting: int
    tokens: int


class DraftsView(msgspec.Struct, kw_only=True):
    """Draft tokens.

    Attributes:
        proposed, accepted: of the last half minute.
        total_rows, total_proposed: since the engine's start; a row is one sequence's draft in one step.
        accepted_at: since the engine's start, how often the first, second … token of a draft was accepted.
    """

    proposed: int
    accepted: int
    total_rows: int
    total_proposed: int
    accepted_at: list[int]


class TotalsView(msgspec.Struct, kw_only=True):
    """What the engine does for all tenants together.

    Attributes:
        prefill_tokens_per_s, output_tokens_per_s: over the last five seconds.
        first_token: times from arrival to the first token.
        inter_token: times between two tokens of a sequence.
        total_steps, total_preemptions, total_output_tokens: since the engine's start.
        total_queried_tokens, total_hit_tokens: prompt tokens looked up and found in the prefix cache.
        steps: the last steps.
        kv: the blocks of each group of layers.
        drafts: draft tokens.
    """

    prefill_tokens_per_s: float
    output_tokens_per_s: float
    first_token: LatencyView
    inter_token: LatencyView
    total_steps: int
    total_preemptions: int
    total_output_tokens: int
    total_queried_tokens: int
    total_hit_tokens: int
    steps: StepsView
    kv: list[BlocksView]
    drafts: DraftsView


class EngineView(msgspec.Struct, kw_only=True):
    """What one model's engine is doing: the answer of `/engine/snapshot`, and the event `snapshot`.

    Attributes:
        model: the model's name.
        started: when the engine began to serve, in Unix time.
        time: Unix time now.
        running, waiting: numbers of sequences that the viewer may see.
        max_running: sequences that run at once at most.
        max_step_tokens: tokens that a step computes at most; 0: not known.
        max_model_len: tokens of prompt and output together at most.
        block_size: tokens in a KV block.
        requests: the sequences that the viewer may see.
        requests_left_out: how many more the viewer could see; long lists are cut.
        tenants: the tenants that the viewer may see.
        totals: what concerns all tenants; null for viewers who are no operators, as it would tell them when
            others send prompts, how long these are, and whether the cache has them.
    """

    model: str
    started: int
    time: float
    running: int
    waiting: int
    max_running: int
    max_step_tokens: int
    max_model_len: int
    block_size: int
    requests: list[RequestView]
    requests_left_out: int
    tenants: list[TenantView]
    totals: TotalsView | None


class EngineNotice(msgspec.Struct, kw_only=True):
    """The data of the events `away`, `restarted` and `gone`; `message` says why, for people."""

    model: str
    message: str


def visible_rows(snapshot: EngineSnapshot, tenant: str, is_operator: bool) -> list[SequenceRow]:
    """The rows that a viewer may see: all of them for operators, and otherwise those of its tenant.

    Args:
        snapshot: what the engine is doing.
        tenant: the viewer's tenant, by the name that its requests carry to the engine; who has none sees no
            rows.
        is_operator: whether the viewer's key has the role `operator`.
    """
    if is_operator:
        return snapshot.rows
    return [row for row in snapshot.rows if tenant and row.tenant == tenant_label(tenant)]


def view_of(
    snapshot: EngineSnapshot,
    info: Ready,
    model: str,
    request_ids: Mapping[int, str],
    *,
    tenant: str,
    is_operator: bool,
) -> EngineView:
    """Describe an engine to a viewer.

    Args:
        snapshot: what it is doing.
        info: its description of itself.
        model: the model's name.
        request_ids: the engine's id of a sequence → its name for clients, where there is one.
        tenant: the viewer's tenant, as in `visible_rows`.
        is_operator: as in `visible_rows`.
    """
    rows, stats = visible_rows(snapshot, tenant, is_operator), snapshot.stats
    tenants = [
        each for each in snapshot.tenants if is_operator or (tenant and each.tenant == tenant_label(tenant))
    ]
    num_running, num_waiting = stats.num_running, stats.num_waiting
    if not is_operator:
        num_running = sum(each.num_running for each in tenants)
        num_waiting = sum(each.num_waiting for each in tenants)
    num_left_out = max(0, num_running + num_waiting - len(rows))
    return EngineView(
        model=model,
        started=info.created_s,
        time=round(time.time(), 3),
        running=num_running,
        waiting=num_waiting,
        max_running=stats.max_num_seqs,
        max_step_tokens=snapshot.max_num_batched_tokens,
        max_model_len=info.max_model_len,
        block_size=stats.block_size,
        requests=[_request(row, request_ids) for row in rows],
        requests_left_out=snapshot.num_rows_left_out if is_operator else num_left_out,
        tenants=[_tenant(share) for share in tenants],
        totals=_totals(snapshot) if is_operator else None,
    )


def _totals(snapshot: EngineSnapshot) -> TotalsView:
    stats = snapshot.stats
    return TotalsView(
        prefill_tokens_per_s=round(snapshot.prefill_tokens_per_s, 1),
        output_tokens_per_s=round(snapshot.generation_tokens_per_s, 1),
        first_token=_latency(snapshot.first_token),
        inter_token=_latency(snapshot.inter_token),
        total_steps=stats.total_steps,
        total_preemptions=stats.total_preemptions,
        total_output_tokens=stats.total_generation_tokens,
        total_queried_tokens=stats.total_queried_tokens,
        total_hit_tokens=stats.total_hit_tokens,
        steps=_steps(snapshot.first_step, snapshot.steps),
        kv=[_blocks(blocks) for blocks in snapshot.kv_groups],
        drafts=DraftsView(
            proposed=snapshot.num_recent_draft_tokens,
            accepted=snapshot.num_recent_accepted_tokens,
            total_rows=stats.total_drafts,
            total_proposed=stats.total_draft_tokens,
            accepted_at=stats.total_accepted_tokens_at,
        ),
    )


def _request(row: SequenceRow, request_ids: Mapping[int, str]) -> RequestView:
    return RequestView(
        id=request_ids.get(row.sequence_id, f"#{row.sequence_id}")[:_MAX_ID_CHARS],
        tenant=row.tenant,
        state=row.state,
        priority=row.priority,
        prompt_tokens=row.num_prompt_tokens,
        computed_tokens=row.num_computed_tokens,
        output_tokens=row.num_output_tokens,
        max_tokens=row.max_tokens,
        cached_tokens=row.num_cached_tokens,
        preemptions=row.num_preemptions,
        wait_s=round(row.wait_s, 3),
        run_s=round(row.run_s, 3),
    )


def _steps(first: int, steps: list[StepSummary]) -> StepsView:
    return StepsView(
        first=first,
        ms=[round(1e3 * step.duration_s, 2) for step in steps],
        prefill_tokens=[step.num_prefill_tokens for step in steps],
        decode_rows=[step.num_decode_rows for step in steps],
        draft_tokens=[step.num_draft_tokens for step in steps],
        accepted_tokens=[step.num_accepted_tokens for step in steps],
        preemptions=[step.num_preemptions for step in steps],
    )


def _blocks(blocks: BlockMap) -> BlocksView:
    return BlocksView(
        window=blocks.window,
        free=blocks.num_free,
        cached=blocks.num_cached,
        used=blocks.num_used,
        shared=blocks.num_shared,
        blocks_per_cell=blocks.blocks_per_cell,
        cells=blocks.cells,
    )


def _latency(times: Percentiles) -> LatencyView:
    has_any = times.count > 0
    return LatencyView(
        p50_ms=round(1e3 * times.p50_s, 2) if has_any else None,
        p95_ms=round(1e3 * times.p95_s, 2) if has_any else None,
        count=times.count,
    )


def _tenant(share: TenantShare) -> TenantView:
    return TenantView(
        tenant=share.tenant, running=share.num_running, waiting=share.num_waiting, tokens=share.num_tokens
    )
