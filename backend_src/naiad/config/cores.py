"""The processor cores that this process may use, and what a configuration asks of them."""

from __future__ import annotations

import os

import psutil

from naiad.config.control_groups import ControlGroups
from naiad.errors import ConfigError


def core_ids(text: str) -> tuple[int, ...]:
    """Read a list of cores such as "0,2-3", in its order; empty for an empty text.

    Raises:
        ConfigError: it is no such list, or names a core twice.
    """
    ids: list[int] = []
    for part in text.split(",") if text else []:
        first, dash, last = part.strip().partition("-")
        bounds = (first, last) if dash else (first, first)
        if not all(each.isascii() and each.isdigit() and len(each) <= 5 for each in bounds):
            raise ConfigError("cpu_affinity", text, "ids of cores such as 0,2-3")
        ids += range(int(bounds[0]), int(bounds[1]) + 1)
        if int(bounds[0]) > int(bounds[1]) or len(set(ids)) < len(ids):
            raise ConfigError("cpu_affinity", text, "ids of cores such as 0,2-3, each of them once")
    return tuple(ids)


def usable_cores() -> int:
    """The number of physical cores that this process may use.

    Two threads on one core share its arithmetic units and slow each other down.
    """
    physical = psutil.cpu_count(logical=False) or 1
    return max(1, ControlGroups().num_cores(min(physical, len(os.sched_getaffinity(0)))))


def num_compute_threads(cpu_threads: int = 0, cpu_affinity: str = "") -> int:
    """The number of threads that compute a step.

    Args:
        cpu_threads: of the configuration. 0: one for each core of `cpu_affinity`, or without that list
            one for each physical core, or OMP_NUM_THREADS if that is smaller.
        cpu_affinity: of the configuration.

    Raises:
        ConfigError: this process may not use that many cores, or not these.
    """
    allowed = os.sched_getaffinity(0)
    if cpu_threads > len(allowed):
        expected = f"0 … {len(allowed)}, the number of cores that the process may use"
        raise ConfigError("cpu_threads", cpu_threads, expected)
    ids = core_ids(cpu_affinity)
    if not allowed.issuperset(ids):
        names = ", ".join(map(str, sorted(allowed)))
        raise ConfigError(
            "cpu_affinity", cpu_affinity, f"some of the cores {names}, which the process may use"
        )
    if cpu_threads or ids:
        return cpu_threads or len(ids)
    named = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    cores = usable_cores()
    return max(1, min(cores, int(named))) if named.isdecimal() else cores
