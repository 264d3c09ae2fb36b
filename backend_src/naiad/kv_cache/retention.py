"""The retention priorities that clients request for blocks in the prefix cache."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable

from naiad.sequence import DEFAULT_KV_PRIORITY, Sequence

_MANY_ENDS = 64


class BlockRetention:
    """The blocks' priorities that differ from the default, and when they expire."""

    def __init__(self, block_size: int, clock: Callable[[], float]) -> None:
        """Start without any.

        Args:
            block_size: tokens in a block.
            clock: returns seconds.
        """
        self._block_size = block_size
        self._clock = clock
        # Block → its priority and when that expires.
        self._asked: dict[int, tuple[int, float]] = {}
        self._ends: list[tuple[float, int]] = []

    def take(self, sequence: Sequence, blocks: Iterable[tuple[int, int]]) -> None:
        """Record the priorities that a sequence requests for the blocks that it frees.

        Args:
            sequence: has a `retention`.
            blocks: for each block its index in the text, and the block that lookups will find.
        """
        retention, size = sequence.retention, self._block_size
        assert retention is not None
        for index, block_id in blocks:
            asked = retention.of_tokens(index * size, (index + 1) * size, sequence.num_prompt_tokens)
            if asked is None:
                continue
            priority, duration_s = asked
            end_s = self._clock() + duration_s
            self._asked[block_id] = priority, end_s
            if end_s < math.inf:
                heapq.heappush(self._ends, (end_s, block_id))
        if len(self._ends) > 2 * len(self._asked) + _MANY_ENDS:
            self._forget_ends()

    def priority(self, block_id: int) -> int:
        """The block's priority; blocks with smaller priorities are evicted first."""
        return self._asked.get(block_id, (DEFAULT_KV_PRIORITY, 0.0))[0]

    def forget(self, block_id: int) -> None:
        """Drop the block's priority, because it gets other tokens."""
        self._asked.pop(block_id, None)

    def _forget_ends(self) -> None:
        """Drop expiry times that no longer apply, so that long durations do not pile up."""
        self._ends = [(end_s, block_id) for block_id, (_, end_s) in self._asked.items() if end_s < math.inf]
        heapq.heapify(self._ends)

    def pop_ended(self) -> list[int]:
        """Return the blocks whose priorities have expired; they have the default priority again."""
        ended = []
        while self._ends and self._ends[0][0] <= self._clock():
            end_s, block_id = heapq.heappop(self._ends)
            if self._asked.get(block_id, (0, 0.0))[1] == end_s:
                del self._asked[block_id]
                ended.append(block_id)
        return ended
