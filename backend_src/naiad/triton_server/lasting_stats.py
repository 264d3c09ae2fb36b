"""The engine's numbers, whichever process it is."""

from __future__ import annotations

import itertools

import msgspec

from naiad.outputs import EngineStats

_TOTALS = [name for name in EngineStats.__struct_fields__ if name.startswith("total_")]


class LastingStats:
    """Totals go on when another process takes over; gauges are those of the process that is.

    One thread writes, others may read.
    """

    def __init__(self) -> None:
        """Start from zero."""
        # One assignment changes both, so that no reader sees a process counted twice or not at all.
        self._state = EngineStats(), EngineStats()

    def take(self, stats: EngineStats) -> None:
        """The process says this of itself."""
        self._state = self._state[0], stats

    def lose(self) -> None:
        """The process has ended; the next one counts from zero."""
        self._state = self.now(), EngineStats()

    def now(self) -> EngineStats:
        """The totals of all processes and the gauges of the last."""
        ended, running = self._state
        totals = {name: _sum(getattr(ended, name), getattr(running, name)) for name in _TOTALS}
        return msgspec.structs.replace(running, **totals)


def _sum(one: int | list[int], other: int | list[int]) -> int | list[int]:
    if isinstance(one, int) and isinstance(other, int):
        return one + other
    assert isinstance(one, list)
    assert isinstance(other, list)
    return [a + b for a, b in itertools.zip_longest(one, other, fillvalue=0)]
