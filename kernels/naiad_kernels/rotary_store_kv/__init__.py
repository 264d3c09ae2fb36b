"""What lies between a layer's fused projection and its attention, in one pass over the heads."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from naiad_kernels.rotary_store_kv import reference
from naiad_kernels.store_kv import Slots

__all__ = ["HeadNorm", "rotary_store_kv"]


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """A root-mean-square norm of every query and key head.

    Attributes:
        weight: `[num_heads + num_kv_heads, head_dim]`, dtype of the heads.
        eps: added to the mean square.
    """

    weight: torch.Tensor
    eps: float


def rotary_store_kv(
    heads: torch.Tensor,
    angles: tuple[torch.Tensor, torch.Tensor],
    norm: HeadNorm | None,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: Slots,
) -> torch.Tensor:
    """Normalise and rotate queries and keys; store keys and values; the same as three ops.

    Args:
        heads: `[num_tokens, num_heads + 2 * num_kv_heads, head_dim]`: queries, keys, values.
        angles: from `rotary_angles`, dtype of `heads`.
        norm: applied before the rotation, or None.
        key_cache: `[num_blocks, num_kv_heads, block_size, head_dim]`, written in place, contiguous.
        value_cache: as `key_cache`.
        slots: as for `store_kv`.

    Returns:
        The queries, `[num_tokens, num_heads, head_dim]`, a new tensor.
    """
    num_kv_heads = key_cache.shape[1]
    assert key_cache.shape == value_cache.shape, (key_cache.shape, value_cache.shape)
    assert heads.shape[1] > 2 * num_kv_heads, (heads.shape, key_cache.shape)
    assert heads.shape[2] == key_cache.shape[3] == angles[0].shape[-1], (heads.shape, key_cache.shape)
    assert heads.dtype == key_cache.dtype == angles[0].dtype, (heads.dtype, key_cache.dtype)
    if norm is not None:
        assert norm.weight.shape == (heads.shape[1] - num_kv_heads, heads.shape[2]), norm.weight.shape
    weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
    if heads.device.type == "cuda":
        from naiad_kernels.rotary_store_kv import kernel

        return kernel.rotary_store_kv(heads, angles, (weight, eps), key_cache, value_cache, slots)
    return reference.rotary_store_kv(heads, angles, (weight, eps), key_cache, value_cache, slots)
