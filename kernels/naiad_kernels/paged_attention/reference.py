"""Reference for `paged_attention`, in plain float32 torch: one sequence and one head at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from naiad_kernels.store_kv import LayerCache
from naiad_kernels.store_kv.quantize import dequantize


def paged_attention(
    query: torch.Tensor,
    cache: LayerCache,
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    *,
    window: int = 0,
    scale: float | None = None,
    soft_cap: float = 0.0,
) -> torch.Tensor:
    """Compute the public op; the step is given as plain lists instead of a plan."""
    scale = query.shape[2] ** -0.5 if scale is None else scale
    num_tokens, num_heads, head_dim = query.shape
    group_size = num_heads // cache.key.shape[1]
    result = torch.full((num_tokens, num_heads, head_dim), torch.nan)
    token = 0
    for query_len, seq_len, table in zip(query_lens, seq_lens, block_tables, strict=True):
        # Both are [tokens, num_kv_heads, head_dim].
        keys = _read(cache.key, cache.key_scale, table)
        values = _read(cache.value, cache.value_scale, table)
        context = seq_len - query_len
        for index in range(query_len):
            end = context + index + 1
            visible = slice(max(0, end - window) if window else 0, end)
            for head in range(num_heads):
                kv_head = head // group_size
                scores = keys[visible, kv_head] @ query[token, head].float() * scale
                if soft_cap:
                    scores = soft_cap * torch.tanh(scores / soft_cap)
                result[token, head] = scores.softmax(0) @ values[visible, kv_head]
            token += 1
    return result.flatten(1).to(query.dtype)


def _read(part: torch.Tensor, scale: torch.Tensor | None, table: Sequence[int]) -> torch.Tensor:
    """A sequence's keys or values, `[tokens, num_kv_heads, head_dim]` float32."""
    blocks = list(table)
    rows = dequantize(part[blocks], None if scale is None else scale[blocks], torch.float32)
    return rows.transpose(1, 2).flatten(0, 1).float()
