"""Blocks by number: a reference count each, and a free list woven through them."""

from __future__ import annotations

# So many blocks have to come back before the free list is sorted again: it is long.
_TIDY_AFTER = 64


class BlockPool:
    """Hands out block ids. Every operation is O(1), but for a tidying when all blocks are free.

    The free list is doubly linked through two arrays, so that a free block that still holds
    reusable KV can be taken from the middle. Blocks without such KV stand in front and are a
    stack: what was freed last is taken first, which keeps the used blocks at the pool's low end,
    where one contiguous range of ids covers them. Blocks kept for reuse stand behind them, the one
    that was freed longest ago first. When the last block comes back the front is sorted again,
    so that no crowded hour scatters the ids for ever.
    """

    def __init__(self, num_blocks: int) -> None:
        """All `num_blocks` blocks are free."""
        assert num_blocks >= 1
        self._num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        # The node behind the last block is the list's head and end.
        self._head = num_blocks
        self._next = [0] * (num_blocks + 1)
        self._previous = [0] * (num_blocks + 1)
        self._kept: set[int] = set()
        self._link(list(range(num_blocks)))

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool, used and free."""
        return self._num_blocks

    @property
    def num_free(self) -> int:
        """Blocks without an owner."""
        return self._num_free

    def ref_count(self, block_id: int) -> int:
        """How many block tables hold the block; 0 = free."""
        return self._ref_counts[block_id]

    def allocate(self) -> int:
        """Take a free block for one owner. The caller has looked at `num_free`."""
        block_id = self._next[self._head]
        assert block_id != self._head, "no free block"
        self._unlink(block_id)
        self._ref_counts[block_id] = 1
        return block_id

    def retain(self, block_id: int) -> None:
        """Add an owner to a block, used or free."""
        if self._ref_counts[block_id] == 0:
            self._unlink(block_id)
        self._ref_counts[block_id] += 1

    def release(self, block_id: int, keep: bool = False) -> None:
        """Take one owner away; the last one frees the block.

        Args:
            block_id: has an owner.
            keep: its KV may be wanted again: take it only when nothing else is free.
        """
        assert self._ref_counts[block_id] > 0, "the block is free already"
        self._ref_counts[block_id] -= 1
        if self._ref_counts[block_id]:
            return
        before = self._previous[self._head] if keep else self._head
        after = self._next[before]
        self._next[before] = self._previous[after] = block_id
        self._previous[block_id], self._next[block_id] = before, after
        self._num_free += 1
        if keep:
            self._kept.add(block_id)
        else:
            self._num_untidy += 1
        if self._num_free == self._num_blocks and self._num_untidy >= min(_TIDY_AFTER, self._num_blocks):
            free = self.free_block_ids()
            num_front = self._num_blocks - len(self._kept)
            self._link(sorted(free[:num_front]) + free[num_front:])

    def free_block_ids(self) -> list[int]:
        """The free list in the order of allocation; O(free blocks)."""
        block_ids = []
        block_id = self._next[self._head]
        while block_id != self._head:
            block_ids.append(block_id)
            block_id = self._next[block_id]
        return block_ids

    def _link(self, block_ids: list[int]) -> None:
        """Make all blocks free, in this order."""
        before = self._head
        for block_id in [*block_ids, self._head]:
            self._next[before], self._previous[block_id] = block_id, before
            before = block_id
        self._num_free = self._num_blocks
        self._num_untidy = 0

    def _unlink(self, block_id: int) -> None:
        before, after = self._previous[block_id], self._next[block_id]
        self._next[before], self._previous[after] = after, before
        self._num_free -= 1
        self._kept.discard(block_id)
