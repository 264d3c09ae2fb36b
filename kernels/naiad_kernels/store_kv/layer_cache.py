"""One layer's KV cache, and where a step's tokens go in it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from naiad_kernels.array_check import check_array
from naiad_kernels.store_kv.quantize import LARGEST_CODE


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's keys and values, in the model's dtype or quantized.

    Attributes:
        key: `[num_blocks, num_kv_heads, block_size, head_dim]`, contiguous; int8 or float8_e4m3fn codes
            if there are scales. GPUs support float8_e4m3fn from sm_90 on.
        value: like `key`.
        key_scale: `[num_blocks, num_kv_heads, block_size]` float32, contiguous: the factor of each
            key's codes. None if `key` is not quantized.
        value_scale: like `key_scale`.
    """

    key: torch.Tensor
    value: torch.Tensor
    key_scale: torch.Tensor | None = None
    value_scale: torch.Tensor | None = None

    @property
    def is_quantized(self) -> bool:
        """Whether keys and values are codes with scales."""
        return self.key_scale is not None

    def check(self, dtype: torch.dtype) -> None:
        """See that the tensors fit each other and a model that computes in `dtype`.

        Raises:
            ValueError: one of them does not.
        """
        key, device = self.key, self.key.device
        if key.dim() != 4:
            expected = "[num_blocks, num_kv_heads, block_size, head_dim]"
            raise ValueError(f"cache.key's shape is {tuple(key.shape)}; allowed: {expected}")
        if self.key_scale is None or self.value_scale is None:
            if self.key_scale is not self.value_scale:
                name = "key_scale" if self.key_scale is None else "value_scale"
                raise ValueError(f"cache.{name} is None; allowed: scales of both keys and values, or none")
            check_array("cache.key", key, dtype, key.shape, device)
        else:
            if key.dtype not in LARGEST_CODE:
                expected = " or ".join(map(str, LARGEST_CODE))
                raise ValueError(f"cache.key's dtype is {key.dtype}; allowed beside scales: {expected}")
            check_array("cache.key", key, key.dtype, key.shape, device)
            check_array("cache.key_scale", self.key_scale, torch.float32, key.shape[:3], device)
            check_array("cache.value_scale", self.value_scale, torch.float32, key.shape[:3], device)
        check_array("cache.value", self.value, key.dtype, key.shape, device)


@dataclass(frozen=True, slots=True)
class Slots:
    """Where each token of a step is stored; built once per step, used by every layer.

    Attributes:
        blocks: `[num_tokens]` int64, block id.
        offsets: `[num_tokens]` int64, position inside the block.
    """

    blocks: torch.Tensor
    offsets: torch.Tensor

    @classmethod
    def from_slot_mapping(cls, slot_mapping: torch.Tensor, block_size: int) -> Slots:
        """Split `slot_mapping` (`[num_tokens]` int64, block id × block_size + offset; −1: padding)."""
        blocks = torch.div(slot_mapping, block_size, rounding_mode="floor")
        return cls(blocks, slot_mapping - blocks * block_size)
