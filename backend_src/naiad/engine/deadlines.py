"""The deadlines of sequences."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator


class Deadlines:
    """A queue of deadlines, the earliest first.

    It is not notified when a sequence ends, so it checks that a sequence is live before it reports the
    deadline.
    """

    def __init__(self, is_live: Callable[[int], bool]) -> None:
        """Start empty.

        Args:
            is_live: returns whether the sequence with this id has not ended.
        """
        self._is_live = is_live
        self._heap: list[tuple[float, int]] = []

    def __len__(self) -> int:
        """Number of stored deadlines, including those of sequences that have ended."""
        return len(self._heap)

    def add(self, deadline_s: float, sequence_id: int) -> None:
        """Add a sequence's deadline."""
        heapq.heappush(self._heap, (deadline_s, sequence_id))

    def pop_passed(self, now_s: float) -> Iterator[int]:
        """Remove the deadlines that have passed; yield the ids of their sequences that are live."""
        while self._heap and self._heap[0][0] <= now_s:
            _, sequence_id = heapq.heappop(self._heap)
            if self._is_live(sequence_id):
                yield sequence_id

    def forget_ended(self, num_live: int) -> None:
        """Drop the deadlines of ended sequences if there are more than two deadlines for each live one.

        Args:
            num_live: number of live sequences; some may have no deadline.
        """
        if len(self._heap) > 2 * num_live:
            self._heap = [entry for entry in self._heap if self._is_live(entry[1])]
            heapq.heapify(self._heap)
