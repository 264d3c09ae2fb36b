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


class MemoryNodes:
    """Nodes that memory comes from in turns.

    Any member of a team of threads may read any weight, so no node is nearer than another, and all of them
    together are read faster than one.
    """

    def __init__(self, numbers: Sequence[int]) -> None:
        """Choose nodes by their numbers; where there are fewer than two, nothing is ever changed."""
        self._numbers = list(numbers)
        self._may_spread = len(self._numbers) > 1

    @classmethod
    def of_process(cls) -> MemoryNodes:
        """Those of the CPUs that this process may use."""
        return cls(nodes_of(os.sched_getaffinity(0)))

    def spread(self, address: int, num_bytes: int) -> None:
        """Let the pages of memory that nobody has written come from the nodes in turns.

        If the system refuses that, it is logged once and not tried again: memory comes as it does otherwise.

        Args:
            address: of a page.
            num_bytes: the memory's size.
        """
        if not self._may_spread:
            return
        try:
            interleave(address, num_bytes, self._numbers)
        except OSError as error:
            self._may_spread = False
            _LOG.info("weights are not spread over the memory nodes %s: %s", self._numbers, error.strerror)


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


def interleave(address: int, num_bytes: int, nodes: Sequence[int]) -> None:
    """Let pages that nobody has written come from these nodes in turns.

    Raises:
        OSError: the system refuses; the standard seccomp profile of containers does so without CAP_SYS_NICE.
    """
    if platform.machine() != "x86_64":
        return
    mask = (ctypes.c_ulong * (_MASK_BITS // 64))()
    for number in nodes:
        mask[number // 64] |= 1 << number % 64
    libc = ctypes.CDLL(None, use_errno=True)
    # The kernel counts one bit more than it reads.
    arguments = (_MPOL_INTERLEAVE, ctypes.byref(mask), ctypes.c_ulong(_MASK_BITS + 1), ctypes.c_uint(0))
    if libc.syscall(_MBIND, ctypes.c_void_p(address), ctypes.c_ulong(num_bytes), *arguments):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _numbers(text: str) -> set[int]:
    """Those of a list such as `0-3,8`."""
    numbers: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return numbers
