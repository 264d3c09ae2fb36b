"""Write a step's keys and values into the paged KV cache."""

from __future__ import annotations

import torch

from naiad_kernels.store_kv import reference
from naiad_kernels.store_kv.layer_cache import LayerCache, Slots

__all__ = ["LayerCache", "Slots", "store_kv"]


def store_kv(key: torch.Tensor, value: torch.Tensor, cache: LayerCache, slots: Slots) -> None:
    """Store one key and one value vector per token and KV head, quantized if the cache is.

    Args:
        key: `[num_tokens, num_kv_heads, head_dim]`, any strides.
        value: same shape as `key`.
        cache: written in place.
        slots: a distinct slot for every token. On a CUDA device a token with a negative block id is
            padding and is not stored.
    """
    cache.check(key.dtype)
    assert key.shape == value.shape, (key.shape, value.shape)
    assert key.shape[1] == cache.key.shape[1], (key.shape, cache.key.shape)
    assert key.shape[2] == cache.key.shape[3], (key.shape, cache.key.shape)
    if key.device.type == "cuda":
        from naiad_kernels.store_kv import kernel

        kernel.store_kv(key, value, cache, slots)
        return
    reference.store_kv(key, value, cache, slots)
