"""Allocates KV cache blocks to sequences and frees them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

from naiad.kv_cache.block_map import block_map
from naiad.kv_cache.block_seconds import BlockSeconds
from naiad.kv_cache.kv_group import KVGroup, KVGroupSpec
from naiad.kv_cache.prefix_cache import NO_BLOCK, BlockName, CachedBlock, PrefixCache
from naiad.sequence import Sequence as EngineSequence
from naiad.snapshot import BlockMap


class KVCacheManager:
    """Owns the blocks of all KV groups; only this class writes `Sequence.block_tables`.

    Every layer of a model belongs to one KV group. Layers of a group see the same part of a text (all
    of it, or a window) and share a pool of blocks and, for each sequence, one block table. The first
    group has full attention if any has.

    A block table only grows until it is freed; in a group with a window its first entries become
    `NO_BLOCK` when no window sees them any more. "No room" is a return value, not an error, and leaves
    all groups unchanged. Full blocks are shared by reference. A partial block has one owner, so if two
    sequences have its tokens in common, it is copied when the second one is admitted.

    Attributes:
        groups: the KV groups.
        has_windows: whether `leave_window` does anything.
        num_queried_tokens, num_hit_tokens: prompt tokens of sequences that were admitted for the first
            time, and how many of them had their KV in the prefix cache.
        block_seconds: how long tenants have held blocks.
    """

    def __init__(
        self,
        groups: int | Sequence[KVGroupSpec],
        block_size: int,
        prefix_cache: PrefixCache | None = None,
        clock: Callable[[], float] = time.monotonic,
        max_step_tokens: int = 0,
    ) -> None:
        """Start with all blocks free.

        Args:
            groups: the KV groups, or the number of blocks of a single one with full attention.
            block_size: tokens in each block.
            prefix_cache: a cache for the same groups; None: KV is never reused.
            clock: returns seconds; block priorities expire on this clock.
            max_step_tokens: maximum tokens of one sequence in one step; required if a group has a window.
        """
        specs = [KVGroupSpec(groups)] if isinstance(groups, int) else list(groups)
        windows = [spec.window for spec in specs]
        self.has_windows = any(window is not None for window in windows)
        assert None not in windows[1:] or windows[0] is None, "groups with full attention come first"
        assert max_step_tokens or not self.has_windows, "max_step_tokens is missing"
        assert prefix_cache is None or prefix_cache.windows == tuple(windows)
        self.block_seconds = BlockSeconds(clock)
        self.groups = tuple(
            KVGroup(index, spec, block_size, max_step_tokens, prefix_cache, clock, self.block_seconds)
            for index, spec in enumerate(specs)
        )
        self._block_size = block_size
        self._prefix_cache = prefix_cache
        # For each sequence with blocks, the prefix cache's entries for its full blocks.
        self._chains: dict[int, list[CachedBlock]] = {}
        # For each group; empty if no group has copies.
        self._copies: list[list[tuple[int, int]]] = []
        self._named_id = -1
        self._names: list[BlockName] = []
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0

    @property
    def draft_fills(self) -> list[int]:
        """The draft fill of each block; the draft model's KV is in the first group's blocks."""
        return self.groups[0].draft_fills

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self._block_size

    @property
    def num_blocks(self) -> int:
        """Number of blocks in all groups."""
        return sum(group.pool.num_blocks for group in self.groups)

    @property
    def num_free_blocks(self) -> int:
        """Number of blocks that no sequence holds."""
        return sum(group.pool.num_free for group in self.groups)

    @property
    def num_used_blocks(self) -> int:
        """Number of blocks that a sequence holds."""
        return self.num_blocks - self.num_free_blocks

    @property
    def max_sequence_tokens(self) -> int | None:
        """Maximum length of a sequence that has all blocks to itself; None: no limit."""
        bounds = [
            group.pool.num_blocks * self._block_size
            for group in self.groups
            if group.max_held_blocks is None or group.max_held_blocks > group.pool.num_blocks
        ]
        return min(bounds, default=None)

    def block_maps(self) -> list[BlockMap]:
        """The blocks of each group by state; O(blocks)."""
        cache = self._prefix_cache
        return [
            block_map(
                group.pool.ref_counts, () if cache is None else cache.held_ids(group.index), group.window
            )
            for group in self.groups
        ]

    def num_blocks_for(self, num_tokens: int) -> int:
        """Number of blocks for this many tokens; the last one may be partial."""
        return -(-num_tokens // self._block_size)

    def num_exclusive_blocks(self, sequence: EngineSequence) -> list[int]:
        """For each group, how many blocks freeing the sequence would free."""
        return [
            sum(block_id != NO_BLOCK and group.pool.ref_count(block_id) == 1 for block_id in table)
            for group, table in zip(self.groups, sequence.block_tables, strict=True)
        ]

    def num_cached_tokens(self, sequence: EngineSequence) -> int:
        """How many tokens of a sequence without blocks need not be computed, as things are now."""
        chain, _ = self._shared(sequence)
        return len(chain) * self._block_size

    def num_missing_blocks(self, sequence: EngineSequence, num_spare_blocks: int = 0) -> list[int]:
        """For each group, how many blocks `admit` lacks; it succeeds if no number is positive."""
        chain, _ = self._shared(sequence)
        lengths = self._table_lengths(sequence.num_tokens, len(chain) * self._block_size)
        return [
            group.num_taken(shared, length) + num_spare_blocks - group.pool.num_free
            for group, shared, length in zip(self.groups, self._tables_of(chain), lengths, strict=True)
        ]

    def admit(self, sequence: EngineSequence, num_spare_blocks: int = 0) -> int | None:
        """Allocate blocks for all known tokens of a sequence that has none.

        In a group with a window a sequence gets at most `KVGroup.max_held_blocks`.

        Args:
            sequence: blocks of its prefix are reused if the prefix cache has them.
            num_spare_blocks: how many blocks must remain free in each group.

        Returns:
            The number of tokens whose KV is already in the cache, or None if there is no room now.
        """
        chain, queried = self._shared(sequence)
        num_cached_tokens = len(chain) * self._block_size
        if not self._fill_tables(sequence, self._tables_of(chain), num_cached_tokens, num_spare_blocks):
            return None
        self._chains[sequence.sequence_id] = chain
        if sequence.num_preemptions == 0:
            self.num_queried_tokens += queried
            self.num_hit_tokens += num_cached_tokens
        return num_cached_tokens

    def fork(self, sequence: EngineSequence, donor: EngineSequence) -> int | None:
        """Like `admit`, from a donor that has computed all the sequence's known tokens but the last.

        Full blocks are shared. The last, partial block is copied, because both sequences will write to
        it; the sequence computes its last known token again to get its logits. If the donor no longer
        has the window that this token attends to, the sequence is admitted like any other.
        """
        num_cached_tokens = sequence.num_tokens - 1
        num_full = num_cached_tokens // self._block_size
        shared = []
        for group, table in zip(self.groups, donor.block_tables, strict=True):
            first = group.first_seen(num_cached_tokens)
            if NO_BLOCK in table[first : first + 1]:
                return self.admit(sequence)
            shared.append([NO_BLOCK] * first + table[first:num_full])
        if not self._fill_tables(sequence, shared, num_cached_tokens):
            return None
        self._chains[sequence.sequence_id] = self._chains.get(donor.sequence_id, [])[:num_full]
        if num_cached_tokens % self._block_size:
            self._copies = self._copies or [[] for _ in self.groups]
            tables = zip(self._copies, donor.block_tables, sequence.block_tables, strict=True)
            for copies, source, target in tables:
                copies.append((source[num_full], target[num_full]))
        return num_cached_tokens

    @property
    def has_copies(self) -> bool:
        """Whether copies are pending; until they are done no block may be written."""
        return bool(self._copies)

    def take_copies(self) -> list[list[tuple[int, int]]]:
        """Return the pending copies, which have to be done before anything else is written.

        Returns:
            For each group (source, destination) blocks, in order; empty if no group has any.
        """
        copies, self._copies = self._copies, []
        return copies

    def allocate(self, sequence: EngineSequence, num_tokens: int) -> bool:
        """Lengthen the block tables for `num_tokens` known tokens; False = no room now."""
        lengths = self._table_lengths(num_tokens, sequence.next_start)
        for group, table, length in zip(self.groups, sequence.block_tables, lengths, strict=True):
            if length - len(table) > group.pool.num_free:
                return False
        for group, table, length in zip(self.groups, sequence.block_tables, lengths, strict=True):
            group.lengthen(table, length, sequence.tenant)
        return True

    def extend(self, sequence: EngineSequence, num_tokens: int) -> int:
        """Lengthen the block tables towards `num_tokens` as far as free blocks allow.

        Returns:
            How many of these tokens have a block in every table now.
        """
        length = self.num_blocks_for(num_tokens)
        for group, table in zip(self.groups, sequence.block_tables, strict=True):
            length = min(length, len(table) + group.pool.num_free)
        for group, table in zip(self.groups, sequence.block_tables, strict=True):
            group.lengthen(table, length, sequence.tenant)
        return min(num_tokens, min(map(len, sequence.block_tables)) * self._block_size)

    def trim(self, sequence: EngineSequence) -> None:
        """Free the blocks after those of the known tokens; they were for drafts."""
        num_kept = self.num_blocks_for(sequence.num_tokens)
        for group, table in zip(self.groups, sequence.block_tables, strict=True):
            group.shorten(table, num_kept, sequence.tenant)

    def publish(self, sequence: EngineSequence, num_tokens: int) -> None:
        """Publish a sequence's full blocks up to `num_tokens`; the step that is being made fills them.

        A layer writes all keys and values of a step before it reads any, so sequences that are admitted
        in the same step may use the blocks too.
        """
        if self._prefix_cache is None:
            return
        chain = self._chains[sequence.sequence_id]
        num_full = num_tokens // self._block_size
        if len(chain) >= num_full:
            return
        for index in range(len(chain), num_full):
            parent = chain[-1] if chain else None
            start = index * self._block_size
            if start + self._block_size > len(sequence.token_ids):
                # The block's last token is sampled by a step in flight.
                return
            chain.append(
                self._prefix_cache.insert(
                    parent,
                    sequence.prefix_identity,
                    sequence.token_ids,
                    start,
                    [table[index] for table in sequence.block_tables],
                )
            )

    def leave_window(self, sequence: EngineSequence) -> None:
        """Free the blocks that no window sees, given the sequence's computed tokens.

        Published blocks remain in the prefix cache until they are allocated again.
        """
        chain = self._chains.get(sequence.sequence_id, [])
        for group in self.groups:
            group.leave_window(sequence, chain)

    def retract(self, sequences: Sequence[EngineSequence]) -> list[list[int]]:
        """Remove the blocks of these sequences, which failed in the same step, from the prefix cache.

        Returns:
            For each group, the blocks that only these sequences hold: clear them before freeing them.
        """
        for sequence in sequences:
            self._retract_left_blocks(sequence)
        own_blocks = []
        for group in self.groups:
            holders = Counter(each for sequence in sequences for each in sequence.block_tables[group.index])
            del holders[NO_BLOCK]
            if self._prefix_cache is not None:
                for block_id in holders:
                    self._prefix_cache.evict(block_id, group.index)
            own_blocks.append([each for each, num in holders.items() if group.pool.ref_count(each) == num])
        return own_blocks

    def free(self, sequence: EngineSequence) -> None:
        """Free all blocks of a sequence; of those kept for reuse, its last block is evicted first.

        The client's retention priorities take precedence over this order.
        """
        chain = self._chains.pop(sequence.sequence_id, [])
        for group in self.groups[: len(sequence.block_tables)]:
            group.free(sequence, chain)

    def _retract_left_blocks(self, sequence: EngineSequence) -> None:
        """Remove the blocks that the sequence's windows have left from the prefix cache."""
        if self._prefix_cache is None or not self.has_windows:
            return
        for index, block in enumerate(self._chains.get(sequence.sequence_id, [])):
            for group, table in enumerate(sequence.block_tables):
                if table[index] == NO_BLOCK:
                    self._prefix_cache.evict(block.block_ids[group], group)

    def _shared(self, sequence: EngineSequence) -> tuple[list[CachedBlock], int]:
        """Blocks that the prefix cache has for the sequence, and the number of tokens looked up."""
        if self._prefix_cache is None or not sequence.reads_prefix_cache:
            return [], 0
        # The last token has to be computed for its logits.
        max_tokens = sequence.num_tokens - 1
        # The first sequence in the queue is looked up in every step until there is room.
        if self._named_id != sequence.sequence_id:
            self._named_id, self._names = sequence.sequence_id, []
        identity = sequence.prefix_identity
        found = self._prefix_cache.match(sequence.token_ids, identity, max_tokens, self._names)
        return found, max_tokens + 1

    def _tables_of(self, chain: list[CachedBlock]) -> list[list[int]]:
        """For each group, the first block table entries of a sequence that starts after these blocks."""
        tables = []
        for group in self.groups:
            first = group.first_seen(len(chain) * self._block_size)
            tables.append([NO_BLOCK] * first + [block.block_ids[group.index] for block in chain[first:]])
        return tables

    def _table_lengths(self, num_tokens: int, num_computed_tokens: int) -> list[int]:
        """For each group, the length of a sequence's block table; the last group's is the shortest.

        The tables of all groups with a window have the same length, which covers the longest step.
        """
        length = self.num_blocks_for(num_tokens)
        if not self.has_windows:
            return [length] * len(self.groups)
        bounds = [group.longest_table(num_computed_tokens) for group in self.groups]
        shortest = min(length, *(bound for bound in bounds if bound is not None))
        return [length if bound is None else shortest for bound in bounds]

    def _fill_tables(
        self,
        sequence: EngineSequence,
        shared: list[list[int]],
        num_cached_tokens: int,
        num_spare_blocks: int = 0,
    ) -> bool:
        """Fill a sequence's tables, each with shared blocks first; False = no room now."""
        tables, num_tokens = sequence.block_tables, sequence.num_tokens
        assert not any(tables), "the sequence has blocks"
        lengths = self._table_lengths(num_tokens, num_cached_tokens)
        for group, blocks, length in zip(self.groups, shared, lengths, strict=True):
            if group.num_taken(blocks, length) + num_spare_blocks > group.pool.num_free:
                return False
        self._named_id = -1  # the tokens of a running sequence may be replaced
        tables.extend([] for _ in range(len(self.groups) - len(tables)))
        for group, table, blocks, length in zip(self.groups, tables, shared, lengths, strict=True):
            group.fill(table, blocks, length, sequence.tenant)
        return True
