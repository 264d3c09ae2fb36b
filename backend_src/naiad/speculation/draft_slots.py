"""Tracks which slots of its KV cache a draft model has filled."""

from __future__ import annotations

from naiad.kv_cache.kv_cache_manager import KVCacheManager
from naiad.sequence import Sequence


class DraftSlots:
    """Tracks for each block how many leading slots hold the draft model's KV (the draft fill).

    The draft model's cache has the same block ids as the target's, so a block's draft KV is shared and
    kept for reuse together with the block, and lost when the block gets other tokens
    (`KVCacheManager.draft_fills`). A block that is copied for a sibling starts without draft KV: the
    draft model reads those tokens, less than one block, again.
    """

    def __init__(self, kv_cache: KVCacheManager) -> None:
        """Share the draft fills of `kv_cache`."""
        self._fills = kv_cache.draft_fills
        self._block_size = kv_cache.block_size

    def missing(self, sequence: Sequence) -> tuple[int, int]:
        """The first range [start, end) of known tokens without draft KV, or else the last known token."""
        size, table, last = self._block_size, sequence.block_table, sequence.num_tokens - 1
        index = 0
        while index < last // size and self._fills[table[index]] == size:
            index += 1
        start = min(index * size + self._fills[table[index]], last)
        end = (index + 1) * size
        while end <= last and self._fills[table[end // size]] == 0:
            end += size
        return start, min(end, last + 1)

    def num_missing(self, sequence: Sequence) -> int:
        """Number of known tokens, without the last, since the latest block that is full of draft KV."""
        size, table, last = self._block_size, sequence.block_table, sequence.num_tokens - 1
        index = last // size
        while index and self._fills[table[index - 1]] < size:
            index -= 1
        return max(0, last - index * size - self._fills[table[index]])

    def fill(self, sequence: Sequence, start: int, end: int) -> None:
        """Record that the next pass writes the draft KV of the known tokens [start, end).

        The pass writes before it reads, so other rows of the same pass may read it already.
        """
        size = self._block_size
        for index in range(start // size, -(-end // size)):
            self._fills[sequence.block_table[index]] = min(size, end - index * size)

    def empty(self, sequence: Sequence, start: int, end: int) -> None:
        """Record that the draft KV of the tokens [start, end) must not be used."""
        size = self._block_size
        for index in range(start // size, -(-end // size)):
            block_id = sequence.block_table[index]
            self._fills[block_id] = min(self._fills[block_id], max(0, start - index * size))
