"""Steps for the attention kernels, over a cache in which everything that must not be read is NaN."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from naiad_kernels.paged_attention import reference
from naiad_kernels.paged_attention.device_step import DeviceStep, plan_device_step
from naiad_kernels.paged_attention.layout import CacheLayout
from naiad_kernels.store_kv import LayerCache
from naiad_kernels.store_kv.quantize import quantize

CPU = torch.device("cpu")


class AttentionCase:
    """Random queries, keys and values of a step; `steps` are pairs (query tokens, cached tokens).

    Blocks are in the cache in a random order. Free blocks, and the rest of a sequence's last block,
    hold NaN; if the cache is quantized, to `cache_dtype`, their scales do.
    """

    def __init__(
        self,
        steps: Sequence[tuple[int, int]],
        heads: tuple[int, int, int] = (6, 2, 16),
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        cache_dtype: torch.dtype | None = None,
        window: int = 0,
        scale: float | None = None,
        soft_cap: float = 0.0,
    ) -> None:
        num_heads, num_kv_heads, head_dim = heads
        self.query_lens = [query for query, _ in steps]
        self.seq_lens = [context for _, context in steps]
        self.layout = CacheLayout(num_heads, num_kv_heads, head_dim, block_size, dtype, CPU, window=window)
        counts = [self.layout.blocks_for(length) for length in self.seq_lens]
        # The last block belongs to no sequence.
        free = list(range(sum(counts) + 2))
        random.Random(seed).shuffle(free)
        self.tables = [[free.pop() for _ in range(count)] for count in counts]

        generator = torch.Generator().manual_seed(0)
        shape = (sum(counts) + 3, num_kv_heads, block_size, head_dim)
        self.keys, self.values = (torch.full(shape, torch.nan, dtype=dtype) for _ in range(2))
        for cache in (self.keys, self.values):
            for table, seq_len in zip(self.tables, self.seq_lens, strict=True):
                rows = torch.randn(num_kv_heads, seq_len, head_dim, generator=generator).to(dtype)
                for index, block in enumerate(table):
                    part = rows[:, index * block_size : (index + 1) * block_size]
                    cache[block, :, : part.shape[1]] = part
        self.cache_dtype = cache_dtype
        self.scale, self.soft_cap = scale, soft_cap
        # As after a fused projection, the queries are part of a wider row.
        fused = torch.randn(sum(self.query_lens), num_heads + 2, head_dim, generator=generator)
        self.query = fused.to(dtype)[:, :num_heads]

    def step(self) -> DeviceStep:
        """The step in the layout that the kernels read."""
        return plan_device_step(self.query_lens, self.seq_lens, self.tables, self.layout)

    def cache(self) -> LayerCache:
        """The keys and values in the layout that the op takes."""
        if self.cache_dtype is None:
            return LayerCache(self.keys, self.values)
        key, key_scale = quantize(self.keys, self.cache_dtype)
        value, value_scale = quantize(self.values, self.cache_dtype)
        return LayerCache(key, value, key_scale, value_scale)

    def expected(self) -> torch.Tensor:
        """The reference's result."""
        return reference.paged_attention(
            self.query,
            self.cache(),
            self.query_lens,
            self.seq_lens,
            self.tables,
            window=self.layout.window,
            scale=self.scale,
            soft_cap=self.soft_cap,
        )

    def forget_what_no_token_sees(self) -> None:
        """Fill blocks entirely before the window with NaN and remove them from the table."""
        null_block = len(self.keys) - 1
        assert all(null_block not in table for table in self.tables)
        for row, (query_len, seq_len) in enumerate(zip(self.query_lens, self.seq_lens, strict=True)):
            num_hidden = self.layout.first_visible(query_len, seq_len) // self.layout.block_size
            hidden = self.tables[row][:num_hidden]
            self.keys[hidden] = torch.nan
            self.values[hidden] = torch.nan
            self.tables[row] = [null_block] * num_hidden + self.tables[row][num_hidden:]
