"""Plots of a run: throughput against batch, and the shares of the memory and the compute bound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from perf.common.plots import Line, Panel, save_panels
from perf.peers.shapes import Shape
from perf.peers.summary import Row

_BOUND = ("bound", 1.0)


def save_plots(rows: Sequence[Row], shapes: Sequence[Shape], name: str) -> list[str]:
    """Plot what was measured; return the files' names.

    Args:
        rows: of `summary.summarize`.
        shapes: all that have rows.
        name: the measurement's name.
    """
    batches = {shape.name: shape.batch for shape in shapes if shape.kind == "decode"}
    lengths = {shape.name: shape.prompt_tokens for shape in shapes if shape.kind == "prefill"}
    speed, shares = [], []
    for group in dict.fromkeys(row["group"] for row in rows):
        mine = [row for row in rows if row["group"] == group]
        speed += _panel(mine, batches, "batch", "tokens_per_s", f"{group}: decode, tokens/s")
        for figure in ("memory", "compute"):
            label = f"{group}: decode, of the {figure} bound"
            shares += _panel(mine, batches, "batch", f"of_{figure}_bound", label, _BOUND)
        label = f"{group}: prefill, of the compute bound"
        shares += _panel(mine, lengths, "prompt tokens", "of_compute_bound", label, _BOUND)
    plots = [
        (name, "Prompts of 128 tokens, 128 new ones", speed),
        (f"{name}-bounds", "Shares of the bounds", shares),
    ]
    return [save_panels(file, title, panels) for file, title, panels in plots if panels]


def _panel(
    rows: Sequence[Row],
    places: Mapping[str, int],
    xlabel: str,
    figure: str,
    ylabel: str,
    level: tuple[str, float] | None = None,
) -> list[Panel]:
    """A panel with a figure of each contestant; none if no row has a place.

    Args:
        rows: of one group.
        places: shape's name → x.
        xlabel: of the panel.
        figure: a key of the rows.
        ylabel: of the panel.
        level: of the panel.
    """
    points: dict[str, tuple[list[float], list[float]]] = {}
    for row in rows:
        if row["shape"] in places:
            x, y = points.setdefault(row["contestant"], ([], []))
            x.append(places[row["shape"]])
            y.append(row[figure])
    lines: dict[str, Line] = dict(points)
    return [Panel(xlabel, ylabel, lines, level, sorted(places.values()))] if lines else []
