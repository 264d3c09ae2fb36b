"""Real arrivals and lengths, served by each engine that can begin a request while others run.

Each group of contestants gets the requests at 80 % of the rate that its fastest peer completes when all of
them wait at once. A round replays a part of the trace; contestants take turns within it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from perf.common.percentile import percentile
from perf.peers.adapter_process import Served
from perf.peers.contestants import Contestant
from perf.peers.summary import Row
from perf.server.open_loop import Arrival
from perf.server.trace_part import LENGTH_SCALE, TracePart

_LOAD = 0.8
_NUM_WARM_UPS = 2


class Servers(Protocol):
    """The contestants that run; see `Arena`."""

    @property
    def running(self) -> list[Contestant]:
        """Those that have not failed."""

    def serve(self, each: Contestant, arrivals: Sequence[Arrival]) -> Served | None:
        """Let one serve requests; None if it fails."""


def replay(servers: Servers, part: TracePart, rounds: int) -> list[Row]:
    """Find each group's rate and replay the trace; a row for each contestant that served all of it."""
    clipped = f"{part.num_clipped} clipped to {part.window_tokens} tokens"
    print(f"trace: {len(part.requests)} requests, lengths × {LENGTH_SCALE:g}, {clipped}", flush=True)
    who = [each for each in servers.running if each.serves]
    for each in who:
        servers.serve(each, part.arrivals(math.inf)[:_NUM_WARM_UPS])
    saturated: dict[Contestant, float] = {}
    for each in rate_setters(who):
        speed = _saturated_per_s(servers, each, part)
        if speed is not None:
            saturated[each] = speed
            print(f"{each.name}: {speed:.2f} requests/s of the trace when saturated", flush=True)
    loads = {
        group: _LOAD * max(speed for each, speed in saturated.items() if each.group == group)
        for group in {each.group for each in saturated}
    }
    served = _rounds(servers, [each for each in who if each.group in loads], part, loads, rounds)
    return [
        _row(each, loads[each.group], saturated.get(each), Served.joined(made), part)
        for each, made in served.items()
        if sum(len(one.first_s) for one in made) == len(part.requests)
    ]


def rate_setters(who: Sequence[Contestant]) -> list[Contestant]:
    """The peers, whose saturated rates count; all of a group in which there is no peer."""
    with_peers = {each.group for each in who if each.is_peer}
    return [each for each in who if each.is_peer or each.group not in with_peers]


def split(arrivals: Sequence[Arrival], rounds: int) -> list[list[Arrival]]:
    """Cut arrivals into consecutive parts, each due from 0 on."""
    size = -(-len(arrivals) // rounds)
    parts = [arrivals[start : start + size] for start in range(0, len(arrivals), size)]
    return [[replace(each, due_s=each.due_s - part[0].due_s) for each in part] for part in parts]


def _saturated_per_s(servers: Servers, each: Contestant, part: TracePart) -> float | None:
    served = servers.serve(each, part.arrivals(math.inf))
    return None if served is None else len(part.requests) / max(served.last_s)


def _rounds(
    servers: Servers, who: Sequence[Contestant], part: TracePart, loads: Mapping[str, float], rounds: int
) -> dict[Contestant, list[Served]]:
    served: dict[Contestant, list[Served]] = {each: [] for each in who}
    for number in range(rounds):
        for each in who:
            parts = split(part.arrivals(loads[each.group]), rounds)
            made = servers.serve(each, parts[number]) if number < len(parts) else None
            if made is not None:
                served[each].append(made)
        print(f"trace: round {number + 1} of {rounds}", flush=True)
    return served


def _row(
    each: Contestant, load_per_s: float, saturated_per_s: float | None, served: Served, part: TracePart
) -> Row:
    row: Row = {
        "contestant": each.name,
        "group": each.group,
        "offered_per_s": round(load_per_s, 2),
        "saturated_per_s": None if saturated_per_s is None else round(saturated_per_s, 2),
        "num_requests": len(served.first_s),
        "num_clipped": part.num_clipped,
    }
    for percent in (50, 95):
        row[f"ttft_p{percent}_s"] = round(percentile(served.first_s, percent), 3)
    for percent in (50, 95):
        row[f"itl_p{percent}_s"] = round(percentile(served.inter_token_s, percent), 4)
    return row
