"""Line plots of measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from perf.common.report import plot_path

_MAX_COLUMNS = 3

Line = tuple[Sequence[float], Sequence[float]]


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes.

    Attributes:
        xlabel, ylabel: with units.
        lines: label → x and y.
        level: label and height of a horizontal line, or None.
    """

    xlabel: str
    ylabel: str
    lines: Mapping[str, Line]
    level: tuple[str, float] | None = None


def save_panels(name: str, title: str, panels: Sequence[Panel]) -> str:
    """Plot panels side by side, three in a row.

    Args:
        name: the measurement's name.
        title: the title above all panels.
        panels: in reading order.

    Returns:
        The file's name.
    """
    from matplotlib.figure import Figure

    num_columns = min(len(panels), _MAX_COLUMNS)
    num_rows = -(-len(panels) // num_columns)
    figure = Figure(figsize=(4.8 * num_columns, 4 * num_rows), layout="constrained")
    for number, panel in enumerate(panels, start=1):
        axes = figure.add_subplot(num_rows, num_columns, number)
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
