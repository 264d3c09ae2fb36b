"""The engine's stats, and what its tenants have used, across restarts of its process."""

from __future__ import annotations

import itertools

import msgspec

from naiad.outputs import EngineStats
from naiad.usage import TenantUsage, added

_TOTALS = [name for name in EngineStats.__struct_fields__ if name.startswith("total_")]


class LastingStats:
    """Totals over all engine processes so far, and gauges of the current one.

    One thread writes; others may read.
    """

    def __init__(self) -> None:
        """Start from zero."""
        self._of_the_ended: EngineStats | None = None
        self._now = EngineStats()

    def take(self, stats: EngineStats) -> None:
        """Take the stats of the current process."""
        ended = self._of_the_ended
        if ended is None:
            self._now = stats
            return
        totals = {name: _sum(getattr(ended, name), getattr(stats, name)) for name in _TOTALS}
        self._now = msgspec.structs.replace(stats, **totals)

    def lose(self) -> None:
        """Keep the totals of a process that has ended; the next process counts from zero."""
        self._of_the_ended = self._now
        self.take(EngineStats())

    def now(self) -> EngineStats:
        """Totals of all processes and gauges of the last one; the same object until they change."""
        return self._now


class LastingUsage:
    """What tenants have used of all engine processes so far. One thread writes; others may read."""

    def __init__(self) -> None:
        """Start from zero."""
        self._of_the_ended: list[TenantUsage] = []
        self._now: list[TenantUsage] = []

    def take(self, usages: list[TenantUsage]) -> None:
        """Take the report of the current process."""
        self._now = added(self._of_the_ended, usages)

    def lose(self) -> None:
        """Keep the last report of a process that has ended; the next process counts from zero."""
        self._of_the_ended = self._now

    def now(self) -> list[TenantUsage]:
        """Usages of all processes; the same object until they change."""
        return self._now


def _sum(one: int | list[int], other: int | list[int]) -> int | list[int]:
    if isinstance(one, int) and isinstance(other, int):
        return one + other
    assert isinstance(one, list)
    assert isinstance(other, list)
    return [a + b for a, b in itertools.zip_longest(one, other, fillvalue=0)]
