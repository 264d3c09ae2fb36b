"""Attention for sequences with one query token, without gathering their keys and values.

Every (block, sequence) pair in use is a batch row of two batched products over the cache in place.
Between them the scores, which are 1 / head_dim of the keys' size, are gathered into one row for each
sequence and head, masked and normalised, and scattered back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from naiad_kernels.paged_attention.layout import CacheLayout, padded_table
from naiad_kernels.store_kv import LayerCache
from naiad_kernels.store_kv.quantize import dequantize


@dataclass(frozen=True, slots=True)
class SingleGroup:
    """Index tensors of a group; S sequences, P pairs, H heads, B blocks of the longest.

    Attributes:
        tokens: the group's rows of the step's query.
        blocks: the pairs' blocks: a range of the cache, read in place, or `[P]` ids to copy.
        owner: `[P]` the sequence of each pair. A block in the range that no sequence owns has a row too,
            which is computed but not used.
        score_rows: `[S * H * B]` rows of the pairs' scores, in the order of the sequences.
        probability_rows: `[P * H]` the inverse mapping.
        partial_rows: `[S * B]` the pairs of each sequence.
        is_used: `[S, 1, B]` 1 for a block in use, 0 for padding; dtype of the query.
        mask: `[S, 1, B * block_size]` float32, 0 for a token that the sequence's last one attends to,
            −inf after it and before its window.
    """

    tokens: slice
    layout: CacheLayout
    blocks: slice | torch.Tensor
    owner: torch.Tensor
    score_rows: torch.Tensor
    probability_rows: torch.Tensor
    partial_rows: torch.Tensor
    is_used: torch.Tensor
    mask: torch.Tensor


def plan_single(
    tokens: slice,
    seq_lens: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    layout: CacheLayout,
) -> SingleGroup:
    """Build a group's tensors on the host and move them to the device."""
    padded = padded_table([1] * len(seq_lens), seq_lens, block_tables, layout)
    table, counts = padded.blocks, padded.counts
    width = table.shape[1]
    is_used = torch.arange(width) < counts[:, None]
    # A cell is an entry of the padded table; pairs are the cells in use.
    pair_cells = is_used.flatten().nonzero().squeeze(1)
    pair_blocks = table.flatten()[pair_cells]
    blocks, pair_of_cell, cell_of_pair = _place_pairs(table, is_used, pair_cells, pair_blocks)

    heads = torch.arange(layout.num_heads)
    score_rows = pair_of_cell[:, None, :] * layout.num_heads + heads[:, None]
    owner = cell_of_pair // width
    column = cell_of_pair % width
    probability_rows = (owner[:, None] * layout.num_heads + heads) * width + column[:, None]
    positions = (padded.origins[:, None] + torch.arange(width * layout.block_size))[:, None]
    ends = torch.tensor(list(seq_lens))[:, None, None]
    is_hidden = positions >= ends
    if layout.window:
        is_hidden |= positions < ends - layout.window
    mask = torch.zeros(is_hidden.shape).masked_fill_(is_hidden, -torch.inf)
    device = layout.device
    return SingleGroup(
        tokens=tokens,
        layout=layout,
        blocks=blocks if isinstance(blocks, slice) else blocks.to(device),
        owner=owner.to(device),
        score_rows=score_rows.flatten().to(device),
        probability_rows=probability_rows.flatten().to(device),
        partial_rows=pair_of_cell.flatten().to(device),
        is_used=is_used[:, None].to(device, layout.dtype),
        mask=mask.to(device),
    )


def _place_pairs(
    table: torch.Tensor, is_used: torch.Tensor, pair_cells: torch.Tensor, pair_blocks: torch.Tensor
) -> tuple[slice | torch.Tensor, torch.Tensor, torch.Tensor]:
    """Decide between reading a range of the cache in place and copying the blocks out.

    Returns:
        The blocks, the pair of each cell `[S, B]` (for padding, a pair of the same sequence) and the
        cell of each pair `[P]`.
    """
    low, high = int(pair_blocks.min()), int(pair_blocks.max()) + 1
    is_shared = len(set(pair_blocks.tolist())) < len(pair_blocks)
    if not is_shared and high - low <= 2 * len(pair_blocks):
        # Reading up to as many unneeded blocks costs less than copying the needed ones.
        cell_of_pair = torch.zeros(high - low, dtype=torch.int64)
        cell_of_pair[pair_blocks - low] = pair_cells
        return slice(low, high), table - low, cell_of_pair
    first_pair = is_used.sum(1).cumsum(0) - is_used.sum(1)
    pair_of_cell = first_pair[:, None] + torch.arange(table.shape[1]) * is_used
    return pair_blocks, pair_of_cell, pair_cells


def attend(
    query: torch.Tensor, cache: LayerCache, group: SingleGroup, scale: float, soft_cap: float
) -> torch.Tensor:
    """Map queries, `[S, num_heads, head_dim]`, to `[S, num_heads * head_dim]`; see `paged_attention`."""
    layout = group.layout
    num_seqs, (num_heads, head_dim) = len(query), query.shape[1:]
    # [P * num_kv_heads, block_size, head_dim]: one small matrix for each pair and KV head.
    keys = _read(cache.key, cache.key_scale, group).flatten(0, 1)
    values = _read(cache.value, cache.value_scale, group).flatten(0, 1)

    pair_query = query.reshape(num_seqs, -1).index_select(0, group.owner)
    scores = torch.bmm(pair_query.view(-1, layout.group_size, head_dim), keys.transpose(1, 2))
    scores = scores.view(-1, layout.block_size).index_select(0, group.score_rows)
    scores = scores.view(num_seqs, num_heads, -1)
    if soft_cap:
        scores, scale = scores.float().mul_(scale / soft_cap).tanh_(), soft_cap
    scores = torch.add(group.mask, scores, alpha=scale)
    probabilities = scores.softmax(-1).to(query.dtype).view(-1, layout.block_size)
    probabilities = probabilities.index_select(0, group.probability_rows)
    partial = torch.bmm(probabilities.view(-1, layout.group_size, layout.block_size), values)
    partial = partial.view(-1, num_heads * head_dim).index_select(0, group.partial_rows)
    partial = partial.view(num_seqs, -1, num_heads * head_dim)
    return torch.bmm(group.is_used, partial).squeeze(1)


def _read(part: torch.Tensor, scale: torch.Tensor | None, group: SingleGroup) -> torch.Tensor:
    """The pairs' blocks of keys or values, `[P, num_kv_heads, block_size, head_dim]`."""
    blocks = group.blocks
    if isinstance(blocks, slice):
        return dequantize(part[blocks], None if scale is None else scale[blocks], group.layout.dtype)
    scale = None if scale is None else scale.index_select(0, blocks)
    return dequantize(part.index_select(0, blocks), scale, group.layout.dtype)
