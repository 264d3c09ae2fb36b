"""The blocks of one group of layers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from naiad.kv_cache.block_pool import BlockPool
from naiad.kv_cache.prefix_cache import NO_BLOCK, CachedBlock, PrefixCache, first_block_in_window
from naiad.kv_cache.retention import BlockRetention
from naiad.sequence import Sequence as EngineSequence


@dataclass(frozen=True, slots=True)
class KVGroupSpec:
    """A group of layers that read the same part of a text; their KV lies in blocks of their own.

    Attributes:
        num_blocks: blocks in the group's pool.
        window: how many tokens a token's layers see, itself included; None: all before it.
    """

    num_blocks: int
    window: int | None = None


def max_held_blocks(window: int, max_step_tokens: int, block_size: int) -> int:
    """Blocks that hold a window and one step's tokens, wherever the first of them lies in its block."""
    return -(-(window + max_step_tokens) // block_size) + 1


class KVGroup:
    """Which blocks of one group are held, and which are worth keeping.

    A sequence's table in a group with full attention covers all its known tokens. In a group with a
    window, blocks that lie before the window are `NO_BLOCK`, and the table reaches only so far past
    the computed tokens that no more than `max_held_blocks` are held: enough for the longest step.

    Attributes:
        index: the group's place in `Sequence.block_tables`.
        window: as in the spec.
        pool: the blocks.
        retention: priorities of blocks that clients have asked for.
        max_held_blocks: what one sequence holds at most, drafts included; None: no bound.
        draft_fills: for each block, how many leading slots hold a draft model's KV of the tokens that
            are in them. The drafter writes it; a block that gets other tokens has 0.
    """

    def __init__(
        self,
        index: int,
        spec: KVGroupSpec,
        block_size: int,
        max_step_tokens: int,
        prefix_cache: PrefixCache | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """All blocks are free.

        Args:
            index: the group's place among all.
            spec: its size and window.
            block_size: tokens in a block.
            max_step_tokens: of one sequence in one step, at most.
            prefix_cache: of all groups.
            clock: seconds.
        """
        self.index = index
        self.window = spec.window
        self.pool = BlockPool(spec.num_blocks)
        self.retention = BlockRetention(block_size, clock)
        self.max_held_blocks: int | None = None
        if spec.window is not None:
            self.max_held_blocks = max_held_blocks(spec.window, max_step_tokens, block_size)
        self.draft_fills = [0] * spec.num_blocks
        self._block_size = block_size
        self._prefix_cache = prefix_cache

    def first_seen(self, num_computed_tokens: int) -> int:
        """The first block that is read for the token after so many others."""
        if self.window is None:
            return 0
        return first_block_in_window(num_computed_tokens, self.window, self._block_size)

    def longest_table(self, num_computed_tokens: int) -> int | None:
        """How long the table of a sequence may be; None: no bound."""
        if self.max_held_blocks is None:
            return None
        return self._first_kept(num_computed_tokens) + self.max_held_blocks

    def num_blocks_for_all(self, num_tokens: int) -> int:
        """Blocks that one sequence holds at most until it has so many tokens."""
        num_blocks = -(-num_tokens // self._block_size)
        return num_blocks if self.max_held_blocks is None else min(num_blocks, self.max_held_blocks)

    def num_taken(self, shared: Sequence[int], length: int) -> int:
        """Free blocks that a table of this length takes which begins with these shared blocks."""
        num_revived = sum(block_id != NO_BLOCK and self.pool.ref_count(block_id) == 0 for block_id in shared)
        return length - len(shared) + num_revived

    def fill(self, table: list[int], shared: Sequence[int], length: int) -> None:
        """Give a sequence that comes its table: shared blocks and new ones."""
        # First of all: a shared block may be free, and the next to be taken.
        for block_id in shared:
            if block_id != NO_BLOCK:
                self.pool.retain(block_id)
        table.extend(shared)
        self.lengthen(table, length)

    def lengthen(self, table: list[int], length: int) -> None:
        """Lengthen a table with new blocks; the caller has looked at what is free."""
        for _ in range(length - len(table)):
            table.append(self._take_block())

    def shorten(self, table: list[int], length: int) -> None:
        """Take back the blocks at a table's end, of which nothing is kept: they were for drafts."""
        surplus = table[length:]
        del table[length:]
        for block_id in reversed(surplus):
            self.pool.release(block_id)

    def leave_window(self, sequence: EngineSequence, chain: list[CachedBlock]) -> None:
        """Free the blocks that no window sees any more."""
        table = sequence.block_tables[self.index]
        first = end = min(self._first_kept(sequence.num_computed_tokens), len(table))
        while first and table[first - 1] != NO_BLOCK:
            first -= 1
        if first < end:
            self._give_back(sequence, chain, range(first, end))
            table[first:end] = [NO_BLOCK] * (end - first)

    def free(self, sequence: EngineSequence, chain: list[CachedBlock]) -> None:
        """Take all blocks of a sequence back, its last one first."""
        table = sequence.block_tables[self.index]
        num_left = 0 if self.window is None else table.count(NO_BLOCK)
        self._give_back(sequence, chain, range(len(table) - 1, num_left - 1, -1))
        table.clear()

    def _first_kept(self, num_computed_tokens: int) -> int:
        """The first block that a sequence keeps: a fork computes the last token again."""
        return self.first_seen(max(0, num_computed_tokens - 1))

    def _give_back(self, sequence: EngineSequence, chain: list[CachedBlock], places: range) -> None:
        """Release blocks in this order; those that can be found are kept, as their client asks."""
        cache, table = self._prefix_cache, sequence.block_tables[self.index]
        if cache is not None and sequence.retention is not None:
            self._keep_as_asked(sequence, chain, places)
        for place in places:
            block_id = table[place]
            is_kept = cache is not None and cache.holds(block_id, self.index)
            self.pool.release(block_id, self.retention.priority(block_id) if is_kept else None)

    def _keep_as_asked(self, sequence: EngineSequence, chain: list[CachedBlock], places: range) -> None:
        table, found = sequence.block_tables[self.index], []
        for place in places:
            # If such tokens were known before, theirs is the block that will be found.
            known = chain[place].block_ids[self.index] if place < len(chain) else NO_BLOCK
            found.append((place, table[place] if known == NO_BLOCK else known))
        self.retention.take(sequence, found)
        for place, block_id in found:
            if block_id != table[place] and self.pool.ref_count(block_id) == 0:
                self.pool.rerank(block_id, self.retention.priority(block_id))

    def _take_block(self) -> int:
        cache = self._prefix_cache
        for ended in self.retention.pop_ended():
            is_kept = cache is not None and cache.holds(ended, self.index)
            if is_kept and self.pool.ref_count(ended) == 0:
                self.pool.rerank(ended, self.retention.priority(ended))
        block_id = self.pool.allocate()
        self.draft_fills[block_id] = 0
        self.retention.forget(block_id)
        if cache is not None:
            cache.evict(block_id, self.index)
        return block_id
