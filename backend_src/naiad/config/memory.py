"""The memory that this process may still allocate."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

_MEMINFO, _CGROUP, _OWN = Path("/proc/meminfo"), Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def available_memory_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP, own: Path = _OWN) -> int:
    """Memory that may still be allocated: what the machine, or its container, has left.

    A container's limit counts the files that have been read too, which make room for what is allocated.
    Limits of the first version of control groups are not seen.
    """
    match = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo.read_text(), re.MULTILINE)
    available = int(match[1]) * 1024 if match else 0
    return min(available, *(_left_bytes(each, available) for each in _groups(cgroup, own)))


def _groups(cgroup: Path, own: Path) -> Iterator[Path]:
    """The group that the process is in, and those around it."""
    yield cgroup
    try:
        match = re.search(r"^0::/(.+)$", own.read_text(), re.MULTILINE)
    except OSError:
        return
    folder = cgroup
    # In a container the path may be that outside of it, and lead to nothing.
    for name in match[1].split("/") if match else ():
        folder /= name
        yield folder


def _left_bytes(group: Path, unlimited: int) -> int:
    try:
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text()) - _file_bytes(group)
    except (OSError, ValueError):
        return unlimited
    return int(limit) - used if limit.isdigit() else unlimited


def _file_bytes(group: Path) -> int:
    try:
        stat = (group / "memory.stat").read_text()
    except OSError:
        return 0
    return sum(map(int, re.findall(r"^(?:in)?active_file (\d+)$", stat, re.MULTILINE)))
