"""Adds what waits for a grammar, of which the engine does not know, to what the engine says of itself."""

from __future__ import annotations

import msgspec

from naiad.engine_process.serving.compiling import CompilingRequests
from naiad.outputs import EngineStats
from naiad.snapshot import MAX_ROWS, MAX_TENANTS, EngineSnapshot, TenantShare


def add_compiling_stats(stats: EngineStats, compiling: CompilingRequests) -> EngineStats:
    """Count sequences that wait for a grammar among those that wait."""
    if not compiling.num_sequences:
        return stats
    return msgspec.structs.replace(
        stats,
        num_waiting=stats.num_waiting + compiling.num_sequences,
        num_waiting_tokens=stats.num_waiting_tokens + compiling.num_tokens,
        num_compiling=compiling.num_sequences,
    )


def add_compiling_rows(snapshot: EngineSnapshot, compiling: CompilingRequests) -> EngineSnapshot:
    """Show sequences that wait for a grammar, and count them among those of their tenants that wait."""
    if not compiling.num_sequences:
        return snapshot
    rows = compiling.rows(MAX_ROWS - len(snapshot.rows))
    counts = compiling.num_by_tenant()
    tenants = [
        msgspec.structs.replace(each, num_waiting=each.num_waiting + counts.pop(each.tenant, 0))
        for each in snapshot.tenants
    ]
    # Of tenants that are not listed only those are new that have nothing in the engine.
    is_complete = snapshot.num_tenants == len(snapshot.tenants)
    if is_complete:
        tenants += [TenantShare(label, 0, count, 0) for label, count in sorted(counts.items())]
    return msgspec.structs.replace(
        snapshot,
        stats=add_compiling_stats(snapshot.stats, compiling),
        rows=[*snapshot.rows, *rows],
        num_rows_left_out=snapshot.num_rows_left_out + compiling.num_sequences - len(rows),
        tenants=tenants[:MAX_TENANTS],
        num_tenants=max(snapshot.num_tenants, len(tenants)),
    )
