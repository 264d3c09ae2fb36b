"""Sorts a step's tokens by adapter and divides them into tiles of one adapter each, on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Tokens of a tile; the same in every step, so that the other tokens of a step do not affect a token's sums.
TILE_TOKENS = 16


@dataclass(frozen=True, slots=True)
class LoraPlan:
    """Which adapter each token of a step uses; one plan serves all layers.

    Attributes:
        adapter_ids: `[num_tokens]` int64, −1: none.
        token_ids: `[num_tokens]` int64, tokens in the order of their adapters.
        tile_adapters: `[num_tiles]` int64, −1: the tile is not used.
        tile_begins: `[num_tiles]` int64, index into `token_ids` of a tile's first token.
        tile_ends: `[num_tiles]` int64, one past its last.
    """

    adapter_ids: torch.Tensor
    token_ids: torch.Tensor
    tile_adapters: torch.Tensor
    tile_begins: torch.Tensor
    tile_ends: torch.Tensor


def plan_lora(adapter_ids: torch.Tensor, num_adapters: int) -> LoraPlan:
    """Make the plan without waiting for the device; its sizes depend on the arguments' sizes alone.

    Args:
        adapter_ids: `[num_tokens]` int64, in [−1, num_adapters).
        num_adapters: number of loaded adapters, ≥ 1.
    """
    assert adapter_ids.dim() == 1, adapter_ids.shape
    assert adapter_ids.dtype == torch.int64, adapter_ids.dtype
    assert num_adapters >= 1, num_adapters
    num_tokens, device = len(adapter_ids), adapter_ids.device
    sorted_ids, token_ids = adapter_ids.sort(stable=True)
    starts = torch.searchsorted(sorted_ids, torch.arange(num_adapters + 1, device=device))
    num_tiles = (starts.diff() + TILE_TOKENS - 1) // TILE_TOKENS
    ends_in_tiles = num_tiles.cumsum(0)
    # A tile has tokens of one adapter only, so each adapter may need one tile that is not full.
    max_tiles = -(-num_tokens // TILE_TOKENS) + min(num_adapters, num_tokens)
    tiles = torch.arange(max_tiles, device=device)
    found = torch.searchsorted(ends_in_tiles, tiles, right=True)
    adapters = found.clamp(max=num_adapters - 1)
    within = tiles - (ends_in_tiles - num_tiles)[adapters]
    begins = starts[adapters] + within * TILE_TOKENS
    ends = torch.minimum(begins + TILE_TOKENS, starts[adapters + 1])
    return LoraPlan(adapter_ids, token_ids, found.where(found < num_adapters, -1), begins, ends)
