"""Reference for `rotary_store_kv`: the separate ops that it replaces."""

from __future__ import annotations

import torch

from naiad_kernels.rms_norm import reference as rms_norm_reference
from naiad_kernels.rotary import reference as rotary_reference
from naiad_kernels.store_kv import LayerCache, Slots
from naiad_kernels.store_kv import reference as store_kv_reference


def rotary_store_kv(
    heads: torch.Tensor,
    angles: tuple[torch.Tensor, torch.Tensor],
    norm: tuple[torch.Tensor | None, float],
    cache: LayerCache,
    slots: Slots,
) -> torch.Tensor:
    """Compute the public op; `norm` is the weight and eps."""
    num_rotated = heads.shape[1] - cache.key.shape[1]
    num_heads = num_rotated - cache.key.shape[1]
    rotated, value = heads[:, :num_rotated], heads[:, num_rotated:]
    weight, eps = norm
    if weight is not None:
        rotated = rms_norm_reference.rms_norm(rotated, weight, eps)
    rotated = rotary_reference.rotary(rotated, *angles)
    key = rotated[:, num_heads:]
    store_kv_reference.store_kv(key, value, cache, slots)
    return rotated[:, :num_heads].contiguous()
