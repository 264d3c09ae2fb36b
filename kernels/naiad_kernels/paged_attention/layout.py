"""Shapes every part of paged attention shares, and the padded block table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

# Draft rows of a sequence with a tree.
MAX_TREE_ROWS = 16
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
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    device: torch.device
    fixed_split: int = 0

    @property
    def group_size(self) -> int:
        """Query heads of one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def scale(self) -> float:
        """Factor of the scores."""
        return float(self.head_dim**-0.5)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-num_tokens // self.block_size)


def fixed_split_for(max_seq_len: int) -> int:
    """Keys of a part so that no more than `MAX_SPLITS` of them cover the longest sequence."""
    return max(1, -(-max_seq_len // (MAX_SPLITS * MIN_SPLIT))) * MIN_SPLIT


def tree_masks(query_lens: Sequence[int], trees: Sequence[Sequence[int] | None]) -> list[int]:
    """A mask for every token of a step, of 32 bits with a sign; all bits without a tree."""
    masks: list[int] = []
    for query_len, tree in zip(query_lens, trees, strict=True):
        if tree is None:
            masks += [-1] * query_len
            continue
        assert len(tree) == query_len <= MAX_TREE_ROWS, (tree, query_len)
        for row, mask in enumerate(tree):
            assert 1 << row <= mask < 2 << row, (tree, row)
        masks += tree
    return masks


def padded_table(
    seq_lens: Sequence[int], block_tables: Sequence[Sequence[int]], layout: CacheLayout
) -> tuple[torch.Tensor, torch.Tensor]:
    """Block tables cut to what is used and padded to one width, on the host.

    Returns:
        `[num_seqs, max_blocks]` int64 and `[num_seqs]` int64 with the blocks in use. The padding
        repeats the sequence's own first block: whatever another sequence's block holds, even NaN
        times a weight of zero, stays out of the row.
    """
    counts = [layout.blocks_for(length) for length in seq_lens]
    width = max(counts)
    rows = []
    for table, count in zip(block_tables, counts, strict=True):
        assert len(table) >= count, (table, count)
        rows.append([*table[:count], *[table[0]] * (width - count)])
    return torch.tensor(rows, dtype=torch.int64), torch.tensor(counts, dtype=torch.int64)
