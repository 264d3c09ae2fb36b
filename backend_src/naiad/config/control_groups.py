"""The control groups around this process, of either version: what a container leaves of memory and cores."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_GROUP = re.compile(r"^\d+:([^:]*):/(.*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class ControlGroups:
    """The groups that this process is in.

    Version 2 of control groups has one tree of groups, and version 1 has one for each controller.

    Attributes:
        root: where they are mounted.
        own: says which groups the process is in.
    """

    root: Path = Path("/sys/fs/cgroup")
    own: Path = Path("/proc/self/cgroup")

    def memory_left(self, available: int) -> int:
        """The bytes that may still be allocated.

        A group's usage counts the files that have been read too, which make room for what is allocated.

        Args:
            available: what the machine has left.
        """
        left = [
            available,
            *(
                _left(group, "memory.max", "memory.current", "", available)
                for group in self._around("", self.root)
            ),
            *(
                _left(group, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_", available)
                for group in self._around("memory", self.root / "memory")
            ),
        ]
        return min(left)

    def num_cores(self, available: int) -> int:
        """The whole cores that the quotas of time leave, at least 1.

        Args:
            available: cores of the machine.
        """
        quotas = [
            *(_words(group / "cpu.max") for group in self._around("", self.root)),
            *(
                _words(group / "cpu.cfs_quota_us") + _words(group / "cpu.cfs_period_us")
                for group in self._around("cpu", self.root / "cpu")
            ),
        ]
        return min([available, *(_whole_cores(quota, available) for quota in quotas)])

    def _around(self, controller: str, tree: Path) -> Iterator[Path]:
        """The process's group in a tree, and those around it.

        Args:
            controller: of version 1; empty: version 2.
            tree: the tree's root.
        """
        yield tree
        try:
            found = _GROUP.findall(self.own.read_text())
        except (OSError, ValueError):
            return
        path = next((path for names, path in found if controller in names.split(",")), "")
        # In a container the path may be that outside of it, and lead to nothing.
        for name in filter(None, path.split("/")):
            tree /= name
            yield tree


def _left(group: Path, limit_file: str, used_file: str, prefix: str, unlimited: int) -> int:
    try:
        limit = (group / limit_file).read_text().strip()
        used = int((group / used_file).read_text()) - _file_bytes(group, prefix)
    except (OSError, ValueError):
        return unlimited
    return int(limit) - used if limit.isdigit() else unlimited


def _file_bytes(group: Path, prefix: str) -> int:
    try:
        stat = (group / "memory.stat").read_text()
    except OSError:
        return 0
    return sum(map(int, re.findall(rf"^{prefix}(?:in)?active_file (\d+)$", stat, re.MULTILINE)))


def _words(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return []


def _whole_cores(quota: list[str], unlimited: int) -> int:
    """Read a quota and its period, in microseconds; "max" or -1 is no quota."""
    if len(quota) != 2 or not all(word.isdigit() for word in quota) or quota[1] == "0":
        return unlimited
    return max(1, int(quota[0]) // int(quota[1]))
