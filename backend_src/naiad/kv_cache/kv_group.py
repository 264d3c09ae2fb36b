"""The blocks of one group of layers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from naiad.kv_cache.block_pool import BlockPool
from naiad.kv_cache.block_seconds import BlockHolders, BlockSeconds
from naiad.kv_cache.prefix_cache import NO_BLOCK, CachedBlock, PrefixCache, first_block_in_window
from naiad.kv_cache.retention import BlockRetention
from naiad.sequence import Sequence as EngineSequence


@dataclass(frozen=True, slots=True)
class KVGroupSpec:
    """A group of layers that see the same part of a text and have their own pool of blocks.

    Attributes:
        num_blocks: blocks in the group's pool.
        window: how many tokens each token attends to, itself included; None: all tokens before it.
    """

    num_blocks: int
    window: int | None = None


def max_held_blocks(window: int, max_step_tokens: int, block_size: int) -> int:
    """Number of blocks for a window and one step's tokens, wherever in a block they start."""
    return -(-(window + max_step_tokens) // block_size) + 1


class KVGroup:
    """The blocks of one KV group: which are held, and which are kept for reuse.

    A sequence's table in a group with full attention covers all its known tokens. In a group with a
    window, blocks before the window are `NO_BLOCK`, and the table ends where the sequence holds
    `max_held_blocks`: enough for the longest step.

    Attributes:
        index: the group's index in `Sequence.block_tables`.
        window: as in the spec.
        pool: the blocks.
        retention: the retention priorities that clients requested.
        max_held_blocks: maximum blocks that one sequence holds, drafts included; None: no limit.
        draft_fills: for each block, how many leading slots hold the draft model's KV of the block's
            tokens. The drafter writes it; it is 0 again when the block is allocated.
    """

    def __init__(
        self,
        index: int,
        spec: KVGroupSpec,
        block_size: int,
        max_step_tokens: int,
        prefix_cache: PrefixCache | None,
        clock: Callable[[], float] = time.monotonic,
        block_seconds: BlockSeconds | None = None,
    ) -> None:
        """Start with all blocks free.

        Args:
            index: the group's index.
            spec: its size and window.
            block_size: tokens in a block.
            max_step_tokens: maximum tokens of one sequence in one step.
            prefix_cache: shared by all groups.
            clock: returns seconds.
            block_seconds: adds up what tenants hold; None: an object of its own.
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
        self._holders = BlockHolders(block_seconds or BlockSeconds(clock))

    def first_seen(self, num_computed_tokens: int) -> int:
        """The index of the first block that the token after this many others attends to."""
        if self.window is None:
            return 0
        return first_block_in_window(num_computed_tokens, self.window, self._block_size)

    def longest_table(self, num_computed_tokens: int) -> int | None:
        """Maximum length of a sequence's table; None: no limit."""
        if self.max_held_blocks is None:
            return None
        return self._first_kept(num_computed_tokens) + self.max_held_blocks

    def num_blocks_for_all(self, num_tokens: int) -> int:
        """The most blocks that a sequence holds at any time until it has this many tokens."""
        num_blocks = -(-num_tokens // self._block_size)
        return num_blocks if self.max_held_blocks is None else min(num_blocks, self.max_held_blocks)

    def num_taken(self, shared: Sequence[int], length: int) -> int:
        """Number of free blocks that a table of this length takes if it starts with these shared blocks."""
        num_revived = sum(block_id != NO_BLOCK and self.pool.ref_count(block_id) == 0 for block_id in shared)
        return length - len(shared) + num_revived

    def fill(self, table: list[int], shared: Sequence[int], length: int, tenant: str) -> None:
        """Fill the table of a tenant's admitted sequence with shared blocks and new ones."""
        # Retain shared blocks first: they may be free, and would be allocated below.
        for block_id in shared:
            if block_id != NO_BLOCK:
                self.pool.retain(block_id)
                self._holders.hold(block_id, tenant)
        table.extend(shared)
        self.lengthen(table, length, tenant)

    def lengthen(self, table: list[int], length: int, tenant: str) -> None:
        """Add new blocks to a tenant's table; the caller has checked that enough are free."""
        for _ in range(length - len(table)):
            block_id = self._take_block()
            self._holders.hold(block_id, tenant)
            table.append(block_id)

    def shorten(self, table: list[int], length: int, tenant: str) -> None:
        """Free the blocks at the end of a tenant's table without keeping their KV; they were for drafts."""
        surplus = table[length:]
        del table[length:]
        for block_id in reversed(surplus):
            self.pool.release(block_id)
            self._holders.leave(block_id, tenant)

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
        """Free all blocks of a sequence, the last one first."""
        table = sequence.block_tables[self.index]
        num_left = 0 if self.window is None else table.count(NO_BLOCK)
        self._give_back(sequence, chain, range(len(table) - 1, num_left - 1, -1))
        table.clear()

    def _first_kept(self, num_computed_tokens: int) -> int:
        """The index of the first block that a sequence keeps; a fork computes the last token again."""
        return self.first_seen(max(0, num_computed_tokens - 1))

    def _give_back(self, sequence: EngineSequence, chain: list[CachedBlock], places: range) -> None:
        """Release blocks in this order; published ones are kept with the client's priorities."""
        cache, table = self._prefix_cache, sequence.block_tables[self.index]
        if cache is not None and sequence.retention is not None:
            self._keep_as_asked(sequence, chain, places)
        for place in places:
            block_id = table[place]
            is_kept = cache is not None and cache.holds(block_id, self.index)
            self.pool.release(block_id, self.retention.priority(block_id) if is_kept else None)
            self._holders.leave(block_id, sequence.tenant)

    def _keep_as_asked(self, sequence: EngineSequence, chain: list[CachedBlock], places: range) -> None:
        table, found = sequence.block_tables[self.index], []
        for place in places:
            # If the same tokens were published before, lookups find that block instead.
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
