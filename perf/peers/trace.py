"""Real arrivals and lengths, served by each engine that can begin a request while others run.

Each group of contestants gets the requests at 80 % of the rate that its fastest peer completes when all of
them wait at once. A round replays a part of the trace; contestants take turns within it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from perf.common.percentile import percentile
from perf.common.report import ROOT
from perf.peers.adapter_process import Served
from perf.peers.contestants import Contestant
from perf.peers.summary import Row
from perf.server.open_loop import Arrival
from perf.server.traces import Scaling, TraceRequest, read_trace, scaled_arrivals

TRACE = ROOT / "perf" / "data" / "azure_llm_2023_conversation_10min.csv"
# The trace's first requests come at a lower rate than the others.
_START_S = 30.0
_LENGTH_SCALE = 0.25
_WINDOW_TOKENS = 1024
_LOAD = 0.8
_NUM_WARM_UPS = 2


class Servers(Protocol):
    """The contestants that run; see `Arena`."""

    @property
    def running(self) -> list[Contestant]:
        """Those that have not failed."""

    def serve(self, each: Contestant, arrivals: Sequence[Arrival]) -> Served | None:
        """Let one serve requests; None if it fails."""


@dataclass(frozen=True, slots=True)
class TracePart:
    """Consecutive requests of a trace, due from 0 on.

    Attributes:
        requests: as they were recorded.
        vocab_size: prompts are random ids below it.
        window_tokens: maximum length of a scaled prompt and output together.
    """

    requests: Sequence[TraceRequest]
    vocab_size: int
    window_tokens: int

    def arrivals(self, per_s: float) -> list[Arrival]:
        """Scale lengths, and times so that requests come at this mean rate; infinite: all at once."""
        return self._scaled(per_s)[0]

    @property
    def num_clipped(self) -> int:
        """How many requests are clipped to the window."""
        return self._scaled(math.inf)[1]

    def _scaled(self, per_s: float) -> tuple[list[Arrival], int]:
        recorded = (len(self.requests) - 1) / self.requests[-1].due_s
        scaling = Scaling(
            speed=per_s / recorded,
            prompt_scale=_LENGTH_SCALE,
            output_scale=_LENGTH_SCALE,
            start_s=0.0,
            duration_s=math.inf,
            window_tokens=self.window_tokens,
        )
        return scaled_arrivals(self.requests, scaling, self.vocab_size)


def read_part(num_requests: int, vocab_size: int, max_length: int, path: Path = TRACE) -> TracePart:
    """Read the requests that are replayed.

    Args:
        num_requests: at least 2.
        vocab_size: of the model.
        max_length: maximum prompt + new tokens that contestants take; longer requests are clipped.
        path: the trace.
    """
    listed = [each for each in read_trace(path) if each.due_s >= _START_S][:num_requests]
    begun = [replace(each, due_s=each.due_s - listed[0].due_s) for each in listed]
    return TracePart(begun, vocab_size, min(_WINDOW_TOKENS, max_length))


def replay(servers: Servers, part: TracePart, rounds: int) -> list[Row]:
    """Find each group's rate and replay the trace; a row for each contestant that served all of it."""
    clipped = f"{part.num_clipped} clipped to {part.window_tokens} tokens"
    print(f"trace: {len(part.requests)} requests, lengths × {_LENGTH_SCALE:g}, {clipped}", flush=True)
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
