"""The shapes that all parts of paged attention share, and the padded block table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

# The most splits of a context, and the fewest keys in a split: enough programs for one long sequence,
# while the partial results of many sequences add 3 % memory traffic.
MAX_SPLITS = 64
MIN_SPLIT = 256


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The properties of the model and the cache that attention needs.

    Attributes:
        num_heads: query heads; query head h reads KV head h // (num_heads / num_kv_heads).
        block_size: tokens in a block.
        dtype: dtype of the query, and of a cache that is not quantized.
        device: device of query and cache.
        fixed_split: 0, or the number of keys in every split, from `fixed_split_for`. Then the order in
            which a GPU sums a token's context depends only on the token's position: batches and chunks
            do not change any bit of the result.
        window: 0, or how many tokens each token attends to at most, itself included.
        is_native: on a CPU, the cache's blocks are laid out for the native kernels.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    device: torch.device
    fixed_split: int = 0
    window: int = 0
    is_native: bool = False

    @property
    def group_size(self) -> int:
        """Number of query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    def blocks_for(self, num_tokens: int) -> int:
        """Number of blocks for this many tokens."""
        return -(-num_tokens // self.block_size)

    def first_visible(self, query_len: int, seq_len: int) -> int:
        """The first position that any of a sequence's last `query_len` tokens attends to."""
        return max(0, seq_len - query_len + 1 - self.window) if self.window else 0


def fixed_split_for(max_seq_len: int) -> int:
    """The number of keys in a split such that `MAX_SPLITS` splits cover the longest sequence."""
    return max(1, -(-max_seq_len // (MAX_SPLITS * MIN_SPLIT))) * MIN_SPLIT


@dataclass(frozen=True, slots=True)
class PaddedTable:
    """Block tables restricted to the blocks that a step reads and padded to one width, on the host.

    Attributes:
        blocks: `[num_seqs, max_blocks]` int64. Padding repeats a block that the sequence reads anyway, so
            that another sequence's block cannot affect the row (zero times NaN is NaN).
        counts: `[num_seqs]` int64, the number of blocks that are read.
        origins: `[num_seqs]` int64, the position of the first key in the first block.
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
    """Omit blocks to which no query token attends: those after the sequence's end or before its window."""
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
