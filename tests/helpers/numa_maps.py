"""What Linux says of the memory nodes that a process's memory comes from."""

from __future__ import annotations

import ctypes
import errno
import mmap
import platform
from pathlib import Path

from naiad.models.memory_nodes import interleave

REASON = "the system neither chooses memory nodes for this process nor tells of them"
_MAPS = Path("/proc/self/numa_maps")


def policy_at(address: int) -> str:
    """The policy of the memory that begins there, such as `interleave`; empty if none begins there."""
    for line in _MAPS.read_text(encoding="ascii").splitlines():
        begin, policy = line.split()[:2]
        if int(begin, 16) == address:
            return policy.partition(":")[0].partition("=")[0]
    return ""


def tells_of_nodes() -> bool:
    """Whether a policy can be read, and may be set, which containers often forbid."""
    if platform.machine() != "x86_64" or not _MAPS.exists():
        return False
    memory = mmap.mmap(-1, mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    try:
        interleave(address, mmap.PAGESIZE, [0])
    except OSError as error:
        return error.errno not in (errno.EPERM, errno.ENOSYS)
    return True
