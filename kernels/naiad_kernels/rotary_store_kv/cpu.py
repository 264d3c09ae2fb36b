"""`rotary_store_kv` on a CPU: the separate ops, each with its fast implementation."""

from __future__ import annotations

import torch

from naiad_kernels.rms_norm import rms_norm
from naiad_kernels.rotary import rotary
from naiad_kernels.store_kv import LayerCache, Slots, store_kv


def rotary_store_kv(
    heads: torch.Tensor,
    angles: tuple[torch.Tensor, torch.Tensor],
    norm: tuple[torch.Tensor | None, float],
    cache: LayerCache,
    slots: Slots,
) -> torch.Tensor:
    """Compute the public op as three ops; `norm` is the weight and eps."""
    num_rotated = heads.shape[1] - cache.key.shape[1]
    num_heads = num_rotated - cache.key.shape[1]
    rotated, value = heads[:, :num_rotated], heads[:, num_rotated:]
    weight, eps = norm
    if weight is not None:
        rotated = rms_norm(rotated, weight, eps)
    rotated = rotary(rotated, *angles)
    store_kv(rotated[:, num_heads:], value, cache, slots)
    return rotated[:, :num_heads]
