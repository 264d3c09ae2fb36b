"""Lines over a common axis, as the measurements plot them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from perf.common.report import plot_path

Line = tuple[Sequence[float], Sequence[float]]


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes.

    Attributes:
        xlabel, ylabel: with units.
        lines: label → x and y.
        level: label and height of a horizontal line; None: none.
    """

    xlabel: str
    ylabel: str
    lines: Mapping[str, Line]
    level: tuple[str, float] | None = None


def save_panels(name: str, title: str, panels: Sequence[Panel]) -> str:
    """Plot panels side by side.

    Args:
        name: of the measurement.
        title: above all panels.
        panels: from left to right.

    Returns:
        The file's name.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.8 * len(panels), 4), layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for label, (x, y) in panel.lines.items():
            axes.plot(x, y, "o-", label=label, markersize=4)
        if panel.level is not None:
            label, height = panel.level
            axes.axhline(height, color="grey", linewidth=0.8, label=label)
        axes.set(xlabel=panel.xlabel, ylabel=panel.ylabel, ylim=(0, None))
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(title)
    path = plot_path(name)
    figure.savefig(path, dpi=120)
    return path.name
