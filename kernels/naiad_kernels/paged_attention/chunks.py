"""Attention for sequences with several query tokens: gathers their contexts, then attends in one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from naiad_kernels.paged_attention.layout import CacheLayout, padded_table
from naiad_kernels.store_kv import LayerCache
from naiad_kernels.store_kv.quantize import dequantize


@dataclass(frozen=True, slots=True)
class ChunkGroup:
    """Index tensors of a group; S sequences, N padded query tokens, B blocks of the longest.

    Attributes:
        tokens: the group's rows of the step's query.
        query_rows: `[S * N]` rows of the group's query; padding repeats the sequence's last token.
        result_rows: `[num_tokens]` index of each token among the padded rows.
        cache_rows: `[S * num_kv_heads * B]` rows of the cache, viewed as one row per block and head.
        mask: `[S, 1, group_size * N, B * block_size]`, 0 or −inf, dtype of the query.
    """

    tokens: slice
    layout: CacheLayout
    num_seqs: int
    query_rows: torch.Tensor
    result_rows: torch.Tensor
    cache_rows: torch.Tensor
    mask: torch.Tensor


def plan_chunks(
    tokens: slice,
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    layout: CacheLayout,
) -> ChunkGroup:
    """Build a group's tensors on the host and move them to the device."""
    table = padded_table(query_lens, seq_lens, block_tables, layout)
    lens, contexts = torch.tensor(list(query_lens)), torch.tensor(list(seq_lens))
    num_padded = int(lens.max())
    index = torch.arange(num_padded)
    is_token = index < lens[:, None]
    own_index = index.minimum(lens[:, None] - 1)
    query_rows = (lens.cumsum(0) - lens)[:, None] + own_index

    heads = torch.arange(layout.num_kv_heads)
    cache_rows = table.blocks[:, None, :] * layout.num_kv_heads + heads[:, None]
    query_positions = ((contexts - lens)[:, None] + own_index)[:, None, :, None]
    width = table.blocks.shape[1] * layout.block_size
    key_positions = (table.origins[:, None] + torch.arange(width))[:, None, None]
    is_hidden = key_positions > query_positions
    if layout.window:
        is_hidden |= key_positions <= query_positions - layout.window
    mask = torch.zeros(is_hidden.shape, dtype=layout.dtype).masked_fill_(is_hidden, -torch.inf)
    device = layout.device
    return ChunkGroup(
        tokens=tokens,
        layout=layout,
        num_seqs=len(lens),
        query_rows=query_rows.flatten().to(device),
        result_rows=is_token.flatten().nonzero().squeeze(1).to(device),
        cache_rows=cache_rows.flatten().to(device),
        mask=mask.to(device).repeat(1, 1, layout.group_size, 1),
    )


def attend(
    query: torch.Tensor, cache: LayerCache, group: ChunkGroup, scale: float, soft_cap: float
) -> torch.Tensor:
    """Map queries, `[num_tokens, num_heads, head_dim]`, to `[num_tokens, num_heads * head_dim]`.

    The query heads of a KV head are stacked as query rows, so keys and values are neither repeated nor
    broadcast.
    """
    layout, num_seqs = group.layout, group.num_seqs
    head_dim, kv_heads, group_size = layout.head_dim, layout.num_kv_heads, layout.group_size
    is_padded = len(group.query_rows) != len(query)
    padded = query.index_select(0, group.query_rows) if is_padded else query
    padded = padded.reshape(num_seqs, -1, kv_heads, group_size, head_dim)
    rows = padded.permute(0, 2, 3, 1, 4).reshape(num_seqs, kv_heads, -1, head_dim)
    keys = _gather(cache.key, cache.key_scale, group)
    values = _gather(cache.value, cache.value_scale, group)
    if soft_cap:
        result = _capped_attention(rows, keys, values, group.mask, scale, soft_cap)
    else:
        result = F.scaled_dot_product_attention(rows, keys, values, attn_mask=group.mask, scale=scale)
    result = result.view(num_seqs, kv_heads, group_size, -1, head_dim).permute(0, 3, 1, 2, 4)
    result = result.reshape(-1, layout.num_heads * head_dim)
    return result.index_select(0, group.result_rows) if is_padded else result


def _capped_attention(
    rows: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    soft_cap: float,
) -> torch.Tensor:
    """Attention with a soft cap, which torch's attention does not have."""
    result = torch.empty_like(rows)
    # One KV head at a time, because the scores of one head are as large as the mask.
    for head in range(rows.shape[1]):
        scores = rows[:, head].float() @ keys[:, head].float().transpose(1, 2)
        scores = scores.mul_(scale / soft_cap).tanh_().mul_(soft_cap).add_(mask[:, 0])
        result[:, head] = scores.softmax(-1).to(rows.dtype) @ values[:, head]
    return result


def _gather(part: torch.Tensor, scale: torch.Tensor | None, group: ChunkGroup) -> torch.Tensor:
    """The group's keys or values, `[S, num_kv_heads, B * block_size, head_dim]`."""
    layout = group.layout
    blocks = part.view(-1, layout.block_size * layout.head_dim).index_select(0, group.cache_rows)
    rows = blocks.view(-1, layout.block_size, layout.head_dim)
    if scale is not None:
        scale = scale.view(-1, layout.block_size).index_select(0, group.cache_rows)
    rows = dequantize(rows, scale, layout.dtype)
    return rows.view(group.num_seqs, layout.num_kv_heads, -1, layout.head_dim)
