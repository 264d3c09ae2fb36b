"""Which slots of the KV cache a draft model has filled, beside the target's."""

from __future__ import annotations

from naiad.kv_cache.kv_cache_manager import KVCacheManager
from naiad.sequence import Sequence


class DraftSlots:
    """Knows of each block how many leading slots hold the draft model's KV.

    The draft model's cache has the target's blocks, by the same numbers. So what holds for a
    block's tokens holds for its draft KV: it is shared with them, kept while they are kept for
    reuse, and gone when the block gets others (`KVCacheManager.draft_fills`). A block that is
    copied for a sibling begins without any: it is read again, less than one block of it.
    """

    def __init__(self, kv_cache: KVCacheManager) -> None:
        """Know what `kv_cache` knows."""
        self._fills = kv_cache.draft_fills
        self._block_size = kv_cache.block_size

    def missing(self, sequence: Sequence) -> tuple[int, int]:
        """The first run [start, end) of known tokens without draft KV; the last known token at least."""
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
        """Known tokens but the last that lack it, as far back as one full block of it."""
        size, table, last = self._block_size, sequence.block_table, sequence.num_tokens - 1
        index = last // size
        while index and self._fills[table[index - 1]] < size:
            index -= 1
        return max(0, last - index * size - self._fills[table[index]])

    def fill(self, sequence: Sequence, start: int, end: int) -> None:
        """A pass that begins now writes the draft KV of the tokens [start, end), which are known.

        It writes before it reads, so others of the same pass may read it already.
        """
        size = self._block_size
        for index in range(start // size, -(-end // size)):
            self._fills[sequence.block_table[index]] = min(size, end - index * size)

    def empty(self, sequence: Sequence, start: int, end: int) -> None:
        """The draft KV of the tokens [start, end) is not to be trusted."""
        size = self._block_size
        for index in range(start // size, -(-end // size)):
            block_id = sequence.block_table[index]
            self._fills[block_id] = min(self._fills[block_id], max(0, start - index * size))
