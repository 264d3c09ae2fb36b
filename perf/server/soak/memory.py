"""What a server's processes hold over time, and whether it grows."""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import psutil
from perf.server.processor_time import OTHERS, kind_of

ENGINE, SUPERVISOR = "engine", "naiad serve"
_ANONYMOUS = re.compile(r"^Anonymous:\s+(\d+) kB", re.M)
# Of the normal distribution, on one side.
_UPPER_95 = 1.645
_HOUR_S = 3600.0
_MIN_POINTS = 5
# Samples at either end of a life that are compared, and what may be under way at one end alone.
_FEW = 12
_MORE_DESCRIPTORS, _MORE_SHARED_MB = 32, 4.0

# For each process its points (hours, megabytes).
Lives = list[list[tuple[float, float]]]


@dataclass(frozen=True, slots=True)
class Sample:
    """What a process held at some moment.

    Attributes:
        at_s: seconds since the soak began.
        role: kind of the process: "tritonserver", a model's name, "engine", …
        life: tells processes of a role apart.
        anonymous_mb: its own memory that is no file's, in megabytes (10⁶ bytes).
        num_descriptors: its open descriptors.
    """

    at_s: float
    role: str
    life: str
    anonymous_mb: float
    num_descriptors: int


@dataclass(frozen=True, slots=True)
class Slope:
    """How fast the memory of a role grows, in megabytes an hour.

    Attributes:
        mb_per_h: the estimate.
        error: its standard error.
        hours: for how long it was observed after warming up, over all lives.
    """

    mb_per_h: float
    error: float
    hours: float

    @property
    def upper(self) -> float:
        """The upper bound at 95 %, one-sided."""
        return self.mb_per_h + _UPPER_95 * self.error

    @property
    def lower(self) -> float:
        """The lower bound at 95 %, one-sided."""
        return self.mb_per_h - _UPPER_95 * self.error


def samples_of(pid: int, at_s: float) -> Iterator[Sample]:
    """Look at a process and its descendants."""
    first = psutil.Process(pid)
    for process in [first, *first.children(recursive=True)]:
        with contextlib.suppress(psutil.Error, OSError):
            role = SUPERVISOR if process == first else role_of(process)
            rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text(encoding="ascii")
            found = _ANONYMOUS.search(rollup)
            if found is not None:
                life = f"{process.pid} {process.create_time()}"
                yield Sample(at_s, role, life, int(found[1]) * 1024 / 1e6, process.num_fds())


def role_of(process: psutil.Process) -> str:
    """The kind of a process below `naiad serve`."""
    command = process.cmdline()
    if "naiad.engine_process" in command:
        return ENGINE
    kind = kind_of(process.name(), command)
    modules = [word for word in command if word.startswith("naiad.")]
    return modules[0] if kind == OTHERS and modules else kind


def shared_memory_mb() -> float:
    """What lies in /dev/shm, in megabytes."""
    return shutil.disk_usage("/dev/shm").used / 1e6 if os.path.isdir("/dev/shm") else math.nan


def minutes_of(samples: Iterable[Sample], warm_up_s: float) -> dict[str, Lives]:
    """Take the median of each minute of each life, without the life's first seconds.

    Returns:
        Role → for each life that lasted long enough its points (hours, megabytes).
    """
    found: dict[str, Lives] = defaultdict(list)
    for role, warm in _warm_lives(samples, warm_up_s):
        points = [
            (60 * minute / _HOUR_S, statistics.median(each.anonymous_mb for each in group))
            for minute, group in groupby(warm, lambda each: int(each.at_s // 60))
        ]
        if len(points) >= _MIN_POINTS:
            found[role].append(points)
    return dict(found)


def kept_descriptors(samples: Iterable[Sample], warm_up_s: float) -> list[str]:
    """Name each life that ends with many more descriptors than it had when it was warm."""
    told = []
    for role, warm in _warm_lives(samples, warm_up_s):
        kept = _risen([each.num_descriptors for each in warm])
        if kept > _MORE_DESCRIPTORS:
            told.append(f"a process of {role!r} holds {kept:g} descriptors more than when it was warm")
    return told


def kept_shared_mb(shared_mb: Sequence[tuple[float, float]], warm_up_s: float) -> list[str]:
    """Say so if much more lies in /dev/shm at the end than after warming up.

    Args:
        shared_mb: points (hours, megabytes).
        warm_up_s: how long the run warms up.
    """
    kept = _risen([mb for at_h, mb in shared_mb if at_h * _HOUR_S >= warm_up_s])
    return [f"/dev/shm holds {kept:.1f} MB more than after warming up"] if kept > _MORE_SHARED_MB else []


def _warm_lives(samples: Iterable[Sample], warm_up_s: float) -> Iterator[tuple[str, list[Sample]]]:
    """The role of each life, and its samples without those of its first seconds."""
    lives: dict[tuple[str, str], list[Sample]] = defaultdict(list)
    for sample in samples:
        lives[sample.role, sample.life].append(sample)
    for (role, _), life in lives.items():
        yield role, [each for each in life if each.at_s - life[0].at_s >= warm_up_s]


def _risen(values: Sequence[float]) -> float:
    """By how much the median of the last few values exceeds that of the first few; 0 if there are too few."""
    if len(values) < 2 * _FEW:
        return 0.0
    return statistics.median(values[-_FEW:]) - statistics.median(values[:_FEW])


def slope_of(lives: Sequence[Sequence[tuple[float, float]]]) -> Slope:
    """Fit one slope to all lives, each with a level of its own (least squares).

    Errors that follow each other are alike, so the standard error counts only as many of them as are
    independent: by the correlation of neighbours (AR(1)).

    Args:
        lives: for each life its points (hours, megabytes).
    """
    centred = [_centred(points) for points in lives]
    spread = sum(x * x for life in centred for x, _ in life)
    if spread == 0.0:
        return Slope(math.nan, math.nan, 0.0)
    slope = sum(x * y for life in centred for x, y in life) / spread
    rests = [[y - slope * x for x, y in life] for life in centred]
    squares = sum(rest * rest for life in rests for rest in life)
    num_points = sum(map(len, rests))
    degrees = num_points - len(rests) - 1
    neighbours = sum(a * b for life in rests for a, b in pairwise(life))
    correlation = min(0.95, max(0.0, neighbours / squares)) if squares else 0.0
    widened = (1 + correlation) / (1 - correlation)
    error = math.sqrt(squares / max(degrees, 1) / spread * widened)
    return Slope(slope, error, sum(points[-1][0] - points[0][0] for points in lives))


def _centred(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    x, y = (statistics.fmean(each[place] for each in points) for place in (0, 1))
    return [(a - x, b - y) for a, b in points]


def total_slope(slopes: Mapping[str, Slope]) -> Slope:
    """The slope of all roles together; NaN if none was observed for long enough."""
    known = [each for each in slopes.values() if not math.isnan(each.mb_per_h)]
    if not known:
        return Slope(math.nan, math.nan, 0.0)
    error = math.sqrt(sum(each.error**2 for each in known))
    return Slope(sum(each.mb_per_h for each in known), error, max(each.hours for each in known))


def slope_rows(slopes: Mapping[str, Slope]) -> list[dict[str, Any]]:
    """A row of figures for each role, and one for all."""
    return [
        {
            "memory of": role,
            "hours": round(slope.hours, 2),
            "MB/h": round(slope.mb_per_h, 3),
            "error": round(slope.error, 3),
            "upper 95 %": round(slope.upper, 3),
        }
        for role, slope in [*slopes.items(), ("all", total_slope(slopes))]
    ]
