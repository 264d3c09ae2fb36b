"""Shapes every part of paged attention shares, and the padded block table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

# Parts that a context is read in, at most, and keys of a part that is as small as can be: enough
# programs for one long sequence, and 3 % more memory traffic for the partial results of many.
MAX_SPLITS = 64
MIN_SPLIT = 256


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """What attention must know of the model and the cache.

    Attributes:
        num_heads: query heads; query head h reads KV head h // (num_heads / num_kv_heads).
        block_size: tokens in a block.
        dtype: of the query, and of a cache that is not quantized.
        device: of query and cache.
        fixed_split: 0, or keys of every part that a context is read in, from `fixed_split_for`. Then
            what a token attends to is summed, on a GPU, in an order that its place in its sequence
            alone gives: batch and chunks do not show, to the last bit.
        window: 0, or how many tokens each token attends to at most, itself included.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    device: torch.device
    fixed_split: int = 0
    window: int = 0

    @property
    def group_size(self) -> int:
        """Query heads of one KV head."""
        return self.num_heads // self.num_kv_heads

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-num_tokens // self.block_size)

    def first_visible(self, query_len: int, seq_len: int) -> int:
        """The first position that any of a sequence's last `query_len` tokens attends to."""
        return max(0, seq_len - query_len + 1 - self.window) if self.window else 0


def fixed_split_for(max_seq_len: int) -> int:
    """Keys of a part so that no more than `MAX_SPLITS` of them cover the longest sequence."""
    return max(1, -(-max_seq_len // (MAX_SPLITS * MIN_SPLIT))) * MIN_SPLIT


@dataclass(frozen=True, slots=True)
class PaddedTable:
    """Block tables cut to the blocks that a step reads and padded to one width, on the host.

    Attributes:
        blocks: `[num_seqs, max_blocks]` int64. The padding repeats a block that the sequence reads
            anyway: whatever another sequence's block holds, even NaN times a weight of zero, stays out
            of the row.
        counts: `[num_seqs]` int64, the blocks that are read.
        origins: `[num_seqs]` int64, the position of the first key in the first of them.
    """

    blocks: torch.Tensor
    counts: torch.Tensor
    origins: torch.Tensor


def padded_table(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    layout: CacheLayout,
) -> PaddedTable:
    """Leave out what no query token attends to: blocks after the sequence's end or before its window."""
    firsts = [
        layout.first_visible(query_len, seq_len) // layout.block_size
        for query_len, seq_len in zip(query_lens, seq_lens, strict=True)
    ]
    ends = [layout.blocks_for(length) for length in seq_lens]
    counts = [end - first for first, end in zip(firsts, ends, strict=True)]
    width = max(counts)
    rows = []
    for table, first, end in zip(block_tables, firsts, ends, strict=True):
        assert len(table) >= end, (table, end)
        rows.append([*table[first:end], *[table[first]] * (width - end + first)])
    return PaddedTable(
        blocks=torch.tensor(rows, dtype=torch.int64),
        counts=torch.tensor(counts, dtype=torch.int64),
        origins=torch.tensor(firsts, dtype=torch.int64) * layout.block_size,
    )
