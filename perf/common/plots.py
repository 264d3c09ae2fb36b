"""Line plots of measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from perf.common.report import plot_path

_MAX_COLUMNS = 3
# Of the legend, for each panel of a row.
_LEGEND_COLUMNS = 2
_NUM_COLORS = 10
_MARKERS = "osD^v"

Line = tuple[Sequence[float], Sequence[float]]


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes.

    Attributes:
        xlabel, ylabel: with units.
        lines: label → x and y.
        level: label and height of a horizontal line, or None.
        xticks: labelled places of the x axis; empty: where matplotlib likes them.
    """

    xlabel: str
    ylabel: str
    lines: Mapping[str, Line]
    level: tuple[str, float] | None = None
    xticks: Sequence[float] = ()


def save_panels(name: str, title: str, panels: Sequence[Panel]) -> str:
    """Plot panels side by side, three in a row, with one legend below them.

    A label has the same colour and marker in all panels.

    Args:
        name: the measurement's name.
        title: the title above all panels.
        panels: in reading order.

    Returns:
        The file's name.
    """
    from matplotlib.artist import Artist
    from matplotlib.figure import Figure

    num_columns = min(len(panels), _MAX_COLUMNS)
    num_rows = -(-len(panels) // num_columns)
    labels = list(dict.fromkeys(label for panel in panels for label in panel.lines))
    legend_columns = num_columns * _LEGEND_COLUMNS
    height = 4 * num_rows + 0.25 * -(-len(labels) // legend_columns)
    figure = Figure(figsize=(4.8 * num_columns, height), layout="constrained")
    handles: dict[str, Artist] = {}
    levels: dict[str, Artist] = {}
    for number, panel in enumerate(panels, start=1):
        axes = figure.add_subplot(num_rows, num_columns, number)
        for label, (x, y) in panel.lines.items():
            turn, color = divmod(labels.index(label), _NUM_COLORS)
            (handles[label],) = axes.plot(x, y, f"{_MARKERS[turn]}-", color=f"C{color}", markersize=4)
        if panel.level is not None:
            label, level = panel.level
            levels[label] = axes.axhline(level, color="grey", linewidth=0.8)
        axes.set(xlabel=panel.xlabel, ylabel=panel.ylabel, ylim=(0, None))
        if panel.xticks:
            axes.set_xticks(panel.xticks)
        axes.grid(alpha=0.3)
    handles |= levels
    num_columns = min(len(handles), legend_columns)
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=num_columns)
    figure.suptitle(title)
    path = plot_path(name)
    figure.savefig(path, dpi=120)
    return path.name
