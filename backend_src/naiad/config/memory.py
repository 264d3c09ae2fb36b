"""The memory that this process may still allocate."""

from __future__ import annotations

import re
from pathlib import Path

from naiad.config.control_groups import ControlGroups

_MEMINFO = Path("/proc/meminfo")


def available_memory_bytes(meminfo: Path = _MEMINFO, groups: ControlGroups | None = None) -> int:
    """Memory that may still be allocated: what the machine, or its container, has left."""
    match = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo.read_text(), re.MULTILINE)
    available = int(match[1]) * 1024 if match else 0
    return (groups or ControlGroups()).memory_left(available)
