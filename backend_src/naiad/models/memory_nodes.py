"""Memory in several places of a machine (NUMA): weights are spread over those where it computes."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
from collections.abc import Collection, Sequence
from pathlib import Path

_LOG = logging.getLogger(__name__)
_NODES = Path("/sys/devices/system/node")
# Of Linux on x86-64, which the native kernels need.
_MBIND, _MPOL_INTERLEAVE = 237, 3
_MASK_BITS = 1024


def nodes_of(cpus: Collection[int], nodes: Path = _NODES) -> list[int]:
    """The nodes that have memory and one of these CPUs, ascending; empty if the system names none."""
    try:
        with_memory = _numbers((nodes / "has_memory").read_text(encoding="ascii"))
        found = [
            number
            for number in sorted(with_memory)
            if _numbers((nodes / f"node{number}" / "cpulist").read_text(encoding="ascii")) & set(cpus)
        ]
    except OSError:
        return []
    return found


def spread(address: int, num_bytes: int) -> None:
    """Let the pages of memory that nobody has written come from all nodes of this process's CPUs in turns.

    Any member of a team of threads may read any weight, so no node is nearer than another, and all of them
    together are read faster than one. Where there is one node, nothing is changed.

    Args:
        address: of a page.
        num_bytes: the memory's size.
    """
    nodes = nodes_of(os.sched_getaffinity(0))
    if len(nodes) > 1:
        interleave(address, num_bytes, nodes)


def interleave(address: int, num_bytes: int, nodes: Sequence[int]) -> None:
    """Let pages that nobody has written come from these nodes in turns, unless the system refuses."""
    if platform.machine() != "x86_64":
        return
    mask = (ctypes.c_ulong * (_MASK_BITS // 64))()
    for number in nodes:
        mask[number // 64] |= 1 << number % 64
    libc = ctypes.CDLL(None, use_errno=True)
    # The kernel counts one bit more than it reads.
    arguments = (_MPOL_INTERLEAVE, ctypes.byref(mask), ctypes.c_ulong(_MASK_BITS + 1), ctypes.c_uint(0))
    if libc.syscall(_MBIND, ctypes.c_void_p(address), ctypes.c_ulong(num_bytes), *arguments):
        reason = os.strerror(ctypes.get_errno())
        _LOG.info("weights are not spread over the memory nodes %s: %s", list(nodes), reason)


def _numbers(text: str) -> set[int]:
    """Those of a list such as `0-3,8`."""
    numbers: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return numbers
