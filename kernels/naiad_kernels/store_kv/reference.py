"""Reference for `store_kv` in plain torch; an indexed store is already fast."""

from __future__ import annotations

import torch

from naiad_kernels.store_kv.layer_cache import LayerCache, Slots
from naiad_kernels.store_kv.quantize import quantize


def store_kv(key: torch.Tensor, value: torch.Tensor, cache: LayerCache, slots: Slots) -> None:
    """Store keys and values as the public op does."""
    parts = ((key, cache.key, cache.key_scale), (value, cache.value, cache.value_scale))
    for vectors, stored, stored_scale in parts:
        if stored_scale is None:
            stored[slots.blocks, :, slots.offsets] = vectors
            continue
        codes, scale = quantize(vectors, stored.dtype)
        stored[slots.blocks, :, slots.offsets] = codes
        stored_scale[slots.blocks, :, slots.offsets] = scale
