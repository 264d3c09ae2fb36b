"""When sequences have to have ended."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator


class Deadlines:
    """The nearest first. Sequences end without a word to it, so it looks who is live."""

    def __init__(self, is_live: Callable[[int], bool]) -> None:
        """Have none.

        Args:
            is_live: whether a sequence has not ended, by its id.
        """
        self._is_live = is_live
        self._heap: list[tuple[float, int]] = []

    def __len__(self) -> int:
        """How many are remembered, of sequences that have ended too."""
        return len(self._heap)

    def add(self, deadline_s: float, sequence_id: int) -> None:
        """Remember a sequence's deadline."""
        heapq.heappush(self._heap, (deadline_s, sequence_id))

    def pop_passed(self, now_s: float) -> Iterator[tuple[float, int]]:
        """The deadlines that have passed and their sequences, if they live when it is their turn."""
        while self._heap and self._heap[0][0] <= now_s:
            deadline_s, sequence_id = heapq.heappop(self._heap)
            if self._is_live(sequence_id):
                yield deadline_s, sequence_id

    def forget_ended(self, num_live: int) -> None:
        """Forget those of sequences that have ended, once they are more than half.

        Args:
            num_live: live sequences; some may have no deadline.
        """
        if len(self._heap) > 2 * num_live:
            self._heap = [entry for entry in self._heap if self._is_live(entry[1])]
            heapq.heapify(self._heap)
