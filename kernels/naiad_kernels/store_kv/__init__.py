"""Write a step's keys and values into the paged KV cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from naiad_kernels.store_kv import reference

__all__ = ["Slots", "store_kv"]


@dataclass(frozen=True, slots=True)
class Slots:
    """Where each token of a step is stored; built once a step, used by every layer.

    Attributes:
        blocks: `[num_tokens]` int64, block id.
        offsets: `[num_tokens]` int64, position inside the block.
    """

    blocks: torch.Tensor
    offsets: torch.Tensor

    @classmethod
    def from_slot_mapping(cls, slot_mapping: torch.Tensor, block_size: int) -> Slots:
        """Split `slot_mapping` (`[num_tokens]` int64, block id × block_size + offset, all ≥ 0)."""
        blocks = torch.div(slot_mapping, block_size, rounding_mode="floor")
        return cls(blocks, slot_mapping - blocks * block_size)


def store_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: Slots,
) -> None:
    """Store one key and one value vector per token and KV head.

    Args:
        key: `[num_tokens, num_kv_heads, head_dim]`, any strides.
        value: as `key`.
        key_cache: `[num_blocks, num_kv_heads, block_size, head_dim]`, written in place.
        value_cache: as `key_cache`.
        slots: a slot for every token; no slot twice. On a CUDA device a token whose block id is
            negative is padding and is not stored.
    """
    assert key.shape == value.shape, (key.shape, value.shape)
    assert key.shape[1] == key_cache.shape[1], (key.shape, key_cache.shape)
    assert key.shape[2] == key_cache.shape[3], (key.shape, key_cache.shape)
    assert key.dtype == key_cache.dtype, (key.dtype, key_cache.dtype)
    if key.device.type == "cuda":
        from naiad_kernels.store_kv import kernel

        kernel.store_kv(key, value, key_cache, value_cache, slots.blocks, slots.offsets)
        return
    reference.store_kv(key, value, key_cache, value_cache, slots.blocks, slots.offsets)
