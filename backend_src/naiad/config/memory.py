"""The memory that this process may still allocate."""

from __future__ import annotations

import re
from pathlib import Path

_MEMINFO, _CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def available_memory_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int:
    """Memory that may still be allocated: what the machine, or its container, has left.

    A container's limit counts the files that have been read too; those that have not been used lately
    make room for what is allocated.
    """
    match = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo.read_text(), re.MULTILINE)
    available = int(match[1]) * 1024 if match else 0
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text()) - _inactive_file_bytes(cgroup)
    except (OSError, ValueError):
        return available
    return min(available, int(limit) - used) if limit.isdigit() else available


def _inactive_file_bytes(cgroup: Path) -> int:
    try:
        match = re.search(r"^inactive_file (\d+)$", (cgroup / "memory.stat").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(match[1]) if match else 0
