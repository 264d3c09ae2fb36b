"""The figures of a run as tables for docs/performance.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from perf.peers.contestants import Contestant
from perf.peers.summary import Row

_RATIO_COLUMNS = (
    *("shape", "contestant", "tokens/s", "spread", "best peer", "× of it"),
    *("of the memory bound", "of the compute bound"),
)
_TRACE_COLUMNS = (
    *("contestant", "requests/s", "saturated, requests/s"),
    *("TTFT p50, s", "TTFT p95, s", "between tokens p50, s", "p95, s"),
)


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table; None is an empty cell, and numbers of thousands get commas."""
    lines = [header, *([_cell(value) for value in row] for row in rows)]
    first, *others = ("| " + " | ".join(line) + " |" for line in lines)
    return "\n".join([first, "|---" * len(header) + "|", *others])


def speeds(rows: Sequence[Row]) -> str:
    """Tokens per second: a row for each shape, a column for each contestant."""
    names = list(dict.fromkeys(row["contestant"] for row in rows))
    shapes = dict.fromkeys(row["shape"] for row in rows)
    by_key = {(row["shape"], row["contestant"]): row["tokens_per_s"] for row in rows}
    return table(
        ["tokens/s", *names], [[shape, *(by_key.get((shape, name)) for name in names)] for shape in shapes]
    )


def ratios(rows: Sequence[Row], who: Sequence[Contestant]) -> str:
    """Naiad's ratios to the best peer, and its shares of the bounds."""
    ours = {each.name for each in who if not each.is_peer}
    return table(
        _RATIO_COLUMNS,
        [
            [
                *(row["shape"], row["contestant"], row["tokens_per_s"], _percent(row["spread"])),
                *(row["best_peer"] or None, row["of_best_peer"]),
                *(_percent(row["of_memory_bound"]), _percent(row["of_compute_bound"])),
            ]
            for row in rows
            if row["contestant"] in ours
        ],
    )


def starts(start_s: Mapping[str, float], memory: Mapping[str, Mapping[str, float]]) -> str:
    """Seconds from start to first token and memory, for each contestant that took part."""
    return table(
        ["contestant", "start to first token, s", "peak resident, MiB", "proportional, MiB"],
        [
            [name, start_s[name], *(memory.get(name, {}).get(key) for key in ("peak_rss_mib", "pss_mib"))]
            for name in start_s
        ],
    )


def trace(rows: Sequence[Row], others: Sequence[Contestant]) -> str:
    """Times under the trace; `others` can not begin a request while others run."""
    served = [
        [
            *(row["contestant"], row["offered_per_s"], row["saturated_per_s"]),
            *(row[f"{time}_p{percent}_s"] for time in ("ttft", "itl") for percent in (50, 95)),
        ]
        for row in rows
    ]
    unserved = [[each.name, "cannot begin a request while others run", *[None] * 5] for each in others]
    return table(
        _TRACE_COLUMNS,
        [*served, *unserved],
    )


def _percent(value: float) -> str:
    return f"{value:.0%}"


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float) and abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
