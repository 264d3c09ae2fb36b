"""Gives sequences their blocks and takes them back."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable

from naiad.kv_cache.block_pool import BlockPool
from naiad.kv_cache.prefix_cache import BlockName, CachedBlock, PrefixCache
from naiad.kv_cache.retention import BlockRetention
from naiad.sequence import Sequence


class KVCacheManager:
    """Owns the pool and alone writes `Sequence.block_table`.

    A block table only grows until it is freed. "No room" is an answer, not an error, and it
    changes nothing. Full blocks are shared by reference; a block that is not full has one owner,
    so what two sequences have in common there is copied when the second one comes.

    Attributes:
        num_queried_tokens, num_hit_tokens: prompt tokens of sequences that came for the first
            time, and those of them whose KV was in the cache.
        draft_fills: of each block, how many leading slots hold a draft model's KV of the tokens
            that are in them. Whoever drafts writes it; a block that gets other tokens has 0.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        prefix_cache: PrefixCache | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Manage blocks.

        Args:
            num_blocks: all there are.
            block_size: tokens in each.
            prefix_cache: None: nothing is ever reused.
            clock: seconds; priorities of blocks end by it.
        """
        self._pool = BlockPool(num_blocks)
        self._block_size = block_size
        self._prefix_cache = prefix_cache
        self._retention = BlockRetention(block_size, clock)
        # Of each sequence with blocks: its full blocks as the prefix cache knows them.
        self._chains: dict[int, list[CachedBlock]] = {}
        self._copies: list[tuple[int, int]] = []
        self._named_id = -1
        self._names: list[BlockName] = []
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self.draft_fills = [0] * num_blocks

    @property
    def pool(self) -> BlockPool:
        """The blocks, for checks."""
        return self._pool

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self._block_size

    @property
    def num_blocks(self) -> int:
        """All blocks."""
        return self._pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody holds."""
        return self._pool.num_free

    @property
    def num_used_blocks(self) -> int:
        """Blocks that some sequence holds."""
        return self._pool.num_blocks - self._pool.num_free

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that so many tokens fill, the last one perhaps in part."""
        return -(-num_tokens // self._block_size)

    def num_exclusive_blocks(self, sequence: Sequence) -> int:
        """Blocks that would be free if the sequence gave its own back."""
        return sum(self._pool.ref_count(block_id) == 1 for block_id in sequence.block_table)

    def num_blocks_to_admit(self, sequence: Sequence) -> int:
        """Free blocks that `admit` would take."""
        shared, _ = self._shared(sequence)
        return self._num_taken(sequence, [block.block_id for block in shared])

    def admit(self, sequence: Sequence, num_spare_blocks: int = 0) -> int | None:
        """Give a sequence without blocks those for all its known tokens.

        Args:
            sequence: its prompt is in the cache as far as the prefix cache knows.
            num_spare_blocks: so many must still be free afterwards.

        Returns:
            How many of the tokens have their KV in the cache already, or None if there is no
            room now.
        """
        assert not sequence.block_table
        chain, queried = self._shared(sequence)
        shared = [block.block_id for block in chain]
        if self._num_taken(sequence, shared) + num_spare_blocks > self._pool.num_free:
            return None
        self._chains[sequence.sequence_id] = chain
        num_cached = len(shared) * self._block_size
        if sequence.num_preemptions == 0:
            self.num_queried_tokens += queried
            self.num_hit_tokens += num_cached
        self._fill_table(sequence, shared)
        return num_cached

    def fork(self, sequence: Sequence, donor: Sequence) -> int | None:
        """Like `admit`, from a donor that has computed all tokens the sequence knows, but its last.

        Full blocks are shared. The last block, in which both will go on writing, is copied; the
        sequence computes its last known token again, for the logits.
        """
        assert not sequence.block_table
        num_cached = sequence.num_tokens - 1
        num_full = num_cached // self._block_size
        shared = donor.block_table[:num_full]
        if self._num_taken(sequence, shared) > self._pool.num_free:
            return None
        self._chains[sequence.sequence_id] = self._chains.get(donor.sequence_id, [])[:num_full]
        self._fill_table(sequence, shared)
        if num_cached % self._block_size:
            self._copies.append((donor.block_table[num_full], sequence.block_table[num_full]))
        return num_cached

    @property
    def has_copies(self) -> bool:
        """Whether blocks have yet to be copied: until then no block may be written."""
        return bool(self._copies)

    def take_copies(self) -> list[tuple[int, int]]:
        """(from, to) blocks to copy, in order, before anything else is written."""
        copies, self._copies = self._copies, []
        return copies

    def allocate(self, sequence: Sequence, num_tokens: int) -> bool:
        """Lengthen the block table until it holds `num_tokens`; False = no room now."""
        num_new = self.num_blocks_for(num_tokens) - len(sequence.block_table)
        if num_new > self._pool.num_free:
            return False
        sequence.block_table.extend(self._take_block() for _ in range(num_new))
        return True

    def extend(self, sequence: Sequence, num_tokens: int) -> int:
        """Lengthen the block table towards `num_tokens` as far as free blocks allow.

        Returns:
            How many of them it holds now.
        """
        num_new = self.num_blocks_for(num_tokens) - len(sequence.block_table)
        num_new = min(num_new, self._pool.num_free)
        sequence.block_table.extend(self._take_block() for _ in range(num_new))
        return min(num_tokens, len(sequence.block_table) * self._block_size)

    def trim(self, sequence: Sequence) -> None:
        """Take back the blocks behind those of the known tokens: they were for drafts."""
        table = sequence.block_table
        num_kept = self.num_blocks_for(sequence.num_tokens)
        surplus = table[num_kept:]
        del table[num_kept:]
        for block_id in reversed(surplus):
            self._pool.release(block_id)

    def publish(self, sequence: Sequence, num_tokens: int) -> None:
        """The step that starts now computes the sequence up to `num_tokens`: let others find it.

        A step writes all its keys and values before any of them is read, so sequences that come
        into the same step may use them too.
        """
        if self._prefix_cache is None:
            return
        chain = self._chains[sequence.sequence_id]
        for index in range(len(chain), num_tokens // self._block_size):
            parent = chain[-1] if chain else None
            start, block_id = index * self._block_size, sequence.block_table[index]
            if start + self._block_size > len(sequence.token_ids):
                # Its last token is sampled by a step that is under way.
                return
            chain.append(
                self._prefix_cache.insert(parent, sequence.cache_salt, sequence.token_ids, start, block_id)
            )

    def retract(self, sequences: Iterable[Sequence]) -> list[int]:
        """These have failed together, nothing that they wrote is to be trusted: nobody may find it.

        Returns:
            Their blocks that nobody else holds: clear them before they are freed.
        """
        holders = Counter(block_id for sequence in sequences for block_id in sequence.block_table)
        if self._prefix_cache is not None:
            for block_id in holders:
                self._prefix_cache.evict(block_id)
        return [block_id for block_id, num in holders.items() if self._pool.ref_count(block_id) == num]

    def free(self, sequence: Sequence) -> None:
        """Take all blocks back; of those kept for reuse, the last one is the first to go.

        Unless the sequence's client wants some of them kept longer, or less long, than others'.
        """
        cache = self._prefix_cache
        if cache is not None and sequence.retention is not None:
            self._keep_as_asked(cache, sequence)
        for block_id in reversed(sequence.block_table):
            is_kept = cache is not None and block_id in cache
            self._pool.release(block_id, self._retention.priority(block_id) if is_kept else None)
        sequence.block_table.clear()
        self._chains.pop(sequence.sequence_id, None)

    def _keep_as_asked(self, cache: PrefixCache, sequence: Sequence) -> None:
        # A block of the same tokens that was known before is the one that will be found.
        found = [*sequence.block_table]
        for index, known in enumerate(self._chains.get(sequence.sequence_id, ())):
            if cache.has(known):
                found[index] = known.block_id
        self._retention.take(sequence, found)
        for block_id in set(found).difference(sequence.block_table):
            if self._pool.ref_count(block_id) == 0:
                self._pool.rerank(block_id, self._retention.priority(block_id))

    def _shared(self, sequence: Sequence) -> tuple[list[CachedBlock], int]:
        """Blocks that the prefix cache has for the sequence, and the tokens it was asked about."""
        if self._prefix_cache is None or not sequence.reads_prefix_cache:
            return [], 0
        # The last token's logits have to be computed.
        max_tokens = sequence.num_tokens - 1
        # The first in the queue asks in every step until there is room.
        if self._named_id != sequence.sequence_id:
            self._named_id, self._names = sequence.sequence_id, []
        found = self._prefix_cache.match(sequence.token_ids, sequence.cache_salt, max_tokens, self._names)
        return found, max_tokens + 1

    def _num_taken(self, sequence: Sequence, shared: list[int]) -> int:
        num_revived = sum(self._pool.ref_count(block_id) == 0 for block_id in shared)
        return self.num_blocks_for(sequence.num_tokens) - len(shared) + num_revived

    def _fill_table(self, sequence: Sequence, shared: list[int]) -> None:
        self._named_id = -1  # while it runs its tokens may be replaced
        # First of all: a shared block may be free, and the next to be taken.
        for block_id in shared:
            self._pool.retain(block_id)
        num_new = self.num_blocks_for(sequence.num_tokens) - len(shared)
        sequence.block_table.extend(shared)
        sequence.block_table.extend(self._take_block() for _ in range(num_new))

    def _take_block(self) -> int:
        for ended in self._retention.pop_ended():
            is_kept = self._prefix_cache is not None and ended in self._prefix_cache
            if is_kept and self._pool.ref_count(ended) == 0:
                self._pool.rerank(ended, self._retention.priority(ended))
        block_id = self._pool.allocate()
        self.draft_fills[block_id] = 0
        self._retention.forget(block_id)
        if self._prefix_cache is not None:
            self._prefix_cache.evict(block_id)
        return block_id
