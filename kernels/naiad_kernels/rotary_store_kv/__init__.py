"""The ops between a layer's fused projection and its attention, in one pass over the heads."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from naiad_kernels.recording import recordable
from naiad_kernels.rotary_store_kv import cpu
from naiad_kernels.store_kv import LayerCache, Slots

__all__ = ["HeadNorm", "rotary_store_kv"]


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """A root-mean-square norm of every query and key head.

    Attributes:
        weight: `[num_heads + num_kv_heads, head_dim]`, dtype of the heads or float32, as for `rms_norm`.
        eps: added to the mean square.
    """

    weight: torch.Tensor
    eps: float


@recordable
def rotary_store_kv(
    heads: torch.Tensor,
    angles: tuple[torch.Tensor, torch.Tensor],
    norm: HeadNorm | None,
    cache: LayerCache,
    slots: Slots,
) -> torch.Tensor:
    """Normalise and rotate queries and keys, and store keys and values: three ops in one.

    Args:
        heads: `[num_tokens, num_heads + 2 * num_kv_heads, head_dim]`: queries, keys, values.
        angles: from `rotary_angles`, dtype of `heads`.
        norm: applied before the rotation, or None.
        cache: written in place; keys and values are quantized if the cache is.
        slots: a slot for every token, with the rules of `store_kv`.

    Returns:
        The queries, `[num_tokens, num_heads, head_dim]`; they share no memory with `heads`.
    """
    cache.check(heads.dtype)
    num_kv_heads = cache.key.shape[1]
    assert heads.shape[1] > 2 * num_kv_heads, (heads.shape, cache.key.shape)
    assert heads.shape[2] == cache.key.shape[3] == angles[0].shape[-1], (heads.shape, cache.key.shape)
    assert heads.dtype == angles[0].dtype, (heads.dtype, angles[0].dtype)
    if norm is not None:
        assert norm.weight.shape == (heads.shape[1] - num_kv_heads, heads.shape[2]), norm.weight.shape
    weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
    if heads.device.type == "cuda":
        from naiad_kernels.rotary_store_kv import kernel

        return kernel.rotary_store_kv(heads, angles, (weight, eps), cache, slots)
    return cpu.rotary_store_kv(heads, angles, (weight, eps), cache, slots)
