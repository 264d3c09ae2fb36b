"""The pool of KV blocks: a reference count for each block, and a linked free list."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator

# Sorting the long free list is worth it only after this many blocks have been freed.
_TIDY_AFTER = 64


class BlockPool:
    """Hands out block ids. Every operation is O(1), except a sort when all blocks are free.

    The free list is doubly linked through two arrays, so that a free block that still holds
    reusable KV can be taken from the middle. Blocks without such KV come first and form a
    stack: the block freed last is taken first, which keeps the used blocks at the low end of the
    pool, in one nearly contiguous range of ids. Blocks kept for reuse follow, ordered by rank;
    within a rank the block freed longest ago comes first. When the last block is freed, the
    stack is sorted again, so that a busy period does not scatter the ids permanently.
    """

    def __init__(self, num_blocks: int) -> None:
        """Start with all `num_blocks` blocks free."""
        assert num_blocks >= 1
        self._num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        # The node after the last block is both the head and the end of the list.
        self._head = num_blocks
        self._next = [0] * (num_blocks + 1)
        self._previous = [0] * (num_blocks + 1)
        # Further nodes: one for each rank that was ever used, placed before the blocks of that rank.
        self._ranks: list[int] = []
        self._rank_nodes: list[int] = []
        self._next[self._head] = self._previous[self._head] = self._head
        for block_id in reversed(range(num_blocks)):
            self._insert(block_id, self._head)
        self._num_free = num_blocks
        self._num_untidy = 0

    @property
    def num_blocks(self) -> int:
        """Number of blocks in the pool, used and free."""
        return self._num_blocks

    @property
    def num_free(self) -> int:
        """Number of free blocks."""
        return self._num_free

    def ref_count(self, block_id: int) -> int:
        """How many block tables hold the block; 0 = free."""
        return self._ref_counts[block_id]

    @property
    def ref_counts(self) -> list[int]:
        """The reference count of each block; not to be changed."""
        return self._ref_counts

    def allocate(self) -> int:
        """Take a free block for one owner; the caller has checked `num_free`."""
        block_id = self._next[self._head]
        while block_id > self._head:
            block_id = self._next[block_id]
        assert block_id != self._head, "no free block"
        self._unlink(block_id)
        self._ref_counts[block_id] = 1
        return block_id

    def retain(self, block_id: int) -> None:
        """Add an owner to a block, used or free."""
        if self._ref_counts[block_id] == 0:
            self._unlink(block_id)
        self._ref_counts[block_id] += 1

    def release(self, block_id: int, rank: int | None = None) -> None:
        """Remove one owner; without owners the block is free.

        Args:
            block_id: a block with an owner.
            rank: set if the block's KV may be reused: the block is allocated only when no block without
                a rank and none with a smaller rank is free.
        """
        assert self._ref_counts[block_id] > 0, "the block is free already"
        self._ref_counts[block_id] -= 1
        if self._ref_counts[block_id]:
            return
        self._insert(block_id, self._head if rank is None else self._last_of(rank))
        self._num_free += 1
        self._num_untidy += rank is None
        if self._num_free == self._num_blocks and self._num_untidy >= min(_TIDY_AFTER, self._num_blocks):
            self._tidy()

    def rerank(self, block_id: int, rank: int) -> None:
        """Give a free block another rank, as if it had just been freed."""
        assert self._ref_counts[block_id] == 0, "the block is not free"
        self._unlink(block_id)
        self._insert(block_id, self._last_of(rank))
        self._num_free += 1

    def free_block_ids(self) -> list[int]:
        """The free list in the order of allocation; O(free blocks)."""
        return [node for node in self._nodes() if node < self._head]

    def _nodes(self) -> Iterator[int]:
        """Iterate over free blocks and rank nodes in order."""
        node = self._next[self._head]
        while node != self._head:
            yield node
            node = self._next[node]

    def _tidy(self) -> None:
        """Sort the blocks that are not kept for reuse."""
        front = sorted(itertools.takewhile(lambda node: node < self._head, self._nodes()))
        for block_id in front:
            self._remove(block_id)
        for block_id in reversed(front):
            self._insert(block_id, self._head)
        self._num_untidy = 0

    def _last_of(self, rank: int) -> int:
        """The last node of a rank; for an empty rank, the rank's own node."""
        place = bisect.bisect_left(self._ranks, rank)
        if place == len(self._ranks) or self._ranks[place] != rank:
            node = len(self._next)
            self._next.append(0)
            self._previous.append(0)
            self._insert(node, self._previous[self._node_at(place)])
            self._ranks.insert(place, rank)
            self._rank_nodes.insert(place, node)
        return self._previous[self._node_at(place + 1)]

    def _node_at(self, place: int) -> int:
        return self._rank_nodes[place] if place < len(self._rank_nodes) else self._head

    def _insert(self, node: int, before: int) -> None:
        after = self._next[before]
        self._next[before] = self._previous[after] = node
        self._previous[node], self._next[node] = before, after

    def _remove(self, node: int) -> None:
        before, after = self._previous[node], self._next[node]
        self._next[before], self._previous[after] = after, before

    def _unlink(self, block_id: int) -> None:
        self._remove(block_id)
        self._num_free -= 1
