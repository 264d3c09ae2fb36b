"""From times to figures: medians, spreads, ratios to the best peer, shares of the bounds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perf.peers.bounds import Bounds, Need
from perf.peers.contestants import Contestant
from perf.peers.shapes import Shape

Row = dict[str, Any]
# Shape → contestant's name → its turns, in order.
Turns = Mapping[Shape, Mapping[str, Sequence["Turn"]]]


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a contestant.

    Attributes:
        first_s: seconds until all first tokens.
        total_s: seconds until all tokens; 0 if there is only one.
        bounds: what the machine could do, measured before and after the turn.
    """

    first_s: float
    total_s: float
    bounds: Bounds


def tokens_per_s(shape: Shape, turn: Turn) -> float:
    """Prompt tokens per second of a prefill, or else new tokens per second after the first ones."""
    num_tokens = shape.batch * (shape.prompt_tokens if shape.new_tokens == 1 else 1)
    return num_tokens / unit_s(shape, turn)


def unit_s(shape: Shape, turn: Turn) -> float:
    """Seconds of a prefill, or else of a decode step."""
    if shape.new_tokens == 1:
        return turn.first_s
    return max(turn.total_s - turn.first_s, 1e-6) / (shape.new_tokens - 1)


def spread(values: Sequence[float]) -> float:
    """The range of values, divided by their median."""
    return (max(values) - min(values)) / statistics.median(values)


def best_peers(
    shape: Shape, by_name: Mapping[str, Sequence[Turn]], who: Sequence[Contestant]
) -> dict[str, str]:
    """The name of the fastest peer of each group, by its median; a group without peers is absent."""
    best: dict[str, tuple[float, str]] = {}
    for each in who:
        if each.is_peer and each.name in by_name:
            speed = statistics.median(tokens_per_s(shape, turn) for turn in by_name[each.name])
            best[each.group] = max(best.get(each.group, (0.0, "")), (speed, each.name))
    return {group: name for group, (_, name) in best.items()}


def summarize(turns: Turns, who: Sequence[Contestant], needs: Mapping[tuple[str, Shape], Need]) -> list[Row]:
    """Make a row of figures for each shape and contestant.

    Args:
        turns: all contestants of a shape have equally many turns; those that failed are absent.
        who: the contestants.
        needs: (name, shape) → the least that a decode step or a prefill must do.
    """
    rows: list[Row] = []
    for shape, by_name in turns.items():
        best = best_peers(shape, by_name, who)
        for each in who:
            if each.name in by_name:
                rows.append(_row(shape, each, by_name, best.get(each.group), needs[each.name, shape]))
    return rows


def _row(
    shape: Shape, each: Contestant, by_name: Mapping[str, Sequence[Turn]], rival: str | None, need: Need
) -> Row:
    turns = by_name[each.name]
    speeds = [tokens_per_s(shape, turn) for turn in turns]
    ratio = None
    if rival is not None:
        theirs = [tokens_per_s(shape, turn) for turn in by_name[rival]]
        ratio = statistics.median(a / b for a, b in zip(speeds, theirs, strict=True))
    memory = [need.memory_share(unit_s(shape, turn), turn.bounds) for turn in turns]
    compute = [need.compute_share(unit_s(shape, turn), turn.bounds) for turn in turns]
    return {
        "shape": shape.name,
        "contestant": each.name,
        "group": each.group,
        "tokens_per_s": round(statistics.median(speeds), 1),
        "spread": round(spread(speeds), 3),
        "first_token_s": round(statistics.median(turn.first_s for turn in turns), 4),
        "best_peer": rival or "",
        "of_best_peer": None if ratio is None else round(ratio, 2),
        "of_memory_bound": round(statistics.median(memory), 3),
        "of_compute_bound": round(statistics.median(compute), 3),
        "read_gb_per_s": round(statistics.median(turn.bounds.bytes_per_s for turn in turns) / 1e9, 1),
        "peak_gop_per_s": round(statistics.median(turn.bounds.operations_per_s for turn in turns) / 1e9),
    }


def agreement(tokens: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> float:
    """The mean share of each prompt's tokens that are as expected until the first that is not."""
    shares = []
    for ours, theirs in zip(tokens, expected, strict=True):
        pairs = zip(ours, theirs, strict=True)
        same = next((number for number, (a, b) in enumerate(pairs) if a != b), len(theirs))
        shares.append(same / len(theirs))
    return statistics.mean(shares)
