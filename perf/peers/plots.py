"""Plots of a run: throughput against batch, and the shares of the memory and the compute bound."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from perf.common.plots import Line, Panel, save_panels
from perf.peers.shapes import Shape
from perf.peers.summary import Row


def save_plots(rows: Sequence[Row], shapes: Sequence[Shape]) -> list[str]:
    """Plot what was measured; return the files' names.

    Args:
        rows: of `summary.summarize`.
        shapes: all that have rows.
    """
    groups = list(dict.fromkeys(row["group"] for row in rows))
    speed, shares = [], []
    for group in groups:
        mine = [row for row in rows if row["group"] == group]
        decode = _lines(mine, [each for each in shapes if each.kind == "decode"], lambda each: each.batch)
        speed.append(Panel("batch", f"{group}: decode, tokens/s", decode("tokens_per_s")))
        prefill = _lines(
            mine, [each for each in shapes if each.kind == "prefill"], lambda each: each.prompt_tokens
        )
        level = ("bound", 1.0)
        shares += [
            Panel("batch", f"{group}: decode, of the memory bound", decode("of_memory_bound"), level),
            Panel("batch", f"{group}: decode, of the compute bound", decode("of_compute_bound"), level),
            Panel("prompt", f"{group}: prefill, of the compute bound", prefill("of_compute_bound"), level),
        ]
    plots = {
        ("peers", "Prompts of 128 tokens, 128 new ones"): [each for each in speed if each.lines],
        ("peers-bounds", "Share of the bounds"): [each for each in shares if each.lines],
    }
    return [save_panels(name, title, panels) for (name, title), panels in plots.items() if panels]


def _lines(
    rows: Sequence[Row], shapes: Sequence[Shape], place: Callable[[Shape], int]
) -> Callable[[str], dict[str, Line]]:
    """A function of a figure's name that returns contestant → places and figures."""
    by_name = {shape.name: shape for shape in shapes}

    def lines(figure: str) -> dict[str, Line]:
        points: dict[str, tuple[list[float], list[float]]] = {}
        for row in rows:
            if row["shape"] in by_name:
                x, y = points.setdefault(row["contestant"], ([], []))
                x.append(place(by_name[row["shape"]]))
                y.append(row[figure])
        return dict(points)

    return lines
