"""Gives sequences their blocks and takes them back."""

from __future__ import annotations

from naiad.kv_cache.block_pool import BlockPool
from naiad.kv_cache.prefix_cache import NoPrefixCache, PrefixCache
from naiad.sequence import Sequence


class KVCacheManager:
    """Owns the pool and alone writes `Sequence.block_table`.

    A block table only grows until it is freed. "No room" is an answer, not an error, and it
    changes nothing.
    """

    def __init__(self, num_blocks: int, block_size: int, prefix_cache: PrefixCache | None = None) -> None:
        """Manage `num_blocks` blocks of `block_size` tokens."""
        self._pool = BlockPool(num_blocks)
        self._block_size = block_size
        self._prefix_cache: PrefixCache = prefix_cache or NoPrefixCache()

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

    def admit(self, sequence: Sequence) -> int | None:
        """Give a sequence without blocks those for all its known tokens.

        Returns:
            How many of the tokens have their KV in the cache already, or None if there is no
            room now.
        """
        assert not sequence.block_table
        cached = self._prefix_cache.lookup(sequence.token_ids)
        num_revived = sum(self._pool.ref_count(block_id) == 0 for block_id in cached)
        num_new = self.num_blocks_for(sequence.num_tokens) - len(cached)
        if num_new + num_revived > self._pool.num_free:
            return None
        for block_id in cached:
            self._pool.retain(block_id)
        sequence.block_table.extend(cached)
        sequence.block_table.extend(self._pool.allocate() for _ in range(num_new))
        return len(cached) * self._block_size

    def allocate(self, sequence: Sequence, num_tokens: int) -> bool:
        """Lengthen the block table until it holds `num_tokens`; False = no room now."""
        num_new = self.num_blocks_for(num_tokens) - len(sequence.block_table)
        if num_new > self._pool.num_free:
            return False
        sequence.block_table.extend(self._pool.allocate() for _ in range(num_new))
        return True

    def free(self, sequence: Sequence) -> None:
        """Take all blocks back; the first one is the first to be used again."""
        for block_id in reversed(sequence.block_table):
            self._pool.release(block_id)
        sequence.block_table.clear()
