"""Results as a table for people and as JSON for comparison."""

from __future__ import annotations

import datetime
import json
import math
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from naiad.cli.bench.throughput import Timing, figures, machine

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "perf" / "results"


def print_table(timings: Mapping[int, Mapping[str, Timing]], rival: str) -> None:
    """Print one row per batch and contestant, with the ratio of its new tokens per second to the rival's.

    Args:
        timings: batch → contestant → its timing.
        rival: the contestant that the others are compared with.
    """
    header = f"{'batch':>5}  {'':<14}{'prefill':>10}{'decode':>10}{'all new':>10}  of {rival}"
    print(f"{header}\n{'':>5}  {'':<14}{'tokens/s':>10}{'tokens/s':>10}{'tokens/s':>10}")
    for batch, row in timings.items():
        for name, timing in row.items():
            ratio = timing.output_tokens_per_s / row[rival].output_tokens_per_s
            print(
                f"{batch:>5}  {name:<14}{timing.prefill_tokens_per_s:>10.1f}"
                f"{timing.decode_tokens_per_s:>10.1f}{timing.output_tokens_per_s:>10.1f}  {ratio:.2f} ×"
            )


def print_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a table of figures: one line per row, one column per key of the first row."""
    columns = list(rows[0])
    cells = [columns, *([f"{row[name]}" for name in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


def write_results(
    name: str, settings: Mapping[str, Any], timings: Mapping[int, Mapping[str, Timing]]
) -> Path:
    """Write timings; see `write_report`.

    Args:
        name: the measurement's name.
        settings: how it was run.
        timings: batch → contestant → its timing.
    """
    results = [
        {"contestant": contestant, **figures(timing)}
        for row in timings.values()
        for contestant, timing in row.items()
    ]
    return write_report(name, settings, results)


def write_report(name: str, settings: Mapping[str, Any], results: Sequence[Mapping[str, Any]]) -> Path:
    """Write everything that is needed to judge the figures later.

    Args:
        name: the measurement's name; the file's name begins with the date and time.
        settings: how it was run.
        results: rows of figures.
    """
    now = datetime.datetime.now(datetime.timezone.utc)
    report = {
        "measurement": name,
        "date": now.isoformat(timespec="seconds"),
        "commit": _commit(),
        "machine": machine(),
        "settings": dict(settings),
        "results": [{name: _figure(value) for name, value in row.items()} for row in results],
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{now:%Y-%m-%d-%H%M%S}-{name}.json"
    path.write_text(json.dumps(report, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    return path.relative_to(ROOT)


def plot_path(name: str) -> Path:
    """The path of a measurement's newest plot."""
    RESULTS.mkdir(exist_ok=True)
    return RESULTS / f"{name}.png"


def _figure(value: Any) -> Any:
    """Replace NaN and infinity by None, because JSON has neither."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _commit() -> str:
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return described.stdout.strip() or "unknown"
