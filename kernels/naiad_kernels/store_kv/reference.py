"""What `store_kv` does, in plain torch; an indexed store is already fast."""

from __future__ import annotations

import torch


def store_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    blocks: torch.Tensor,
    offsets: torch.Tensor,
) -> None:
    """See the public op."""
    key_cache[blocks, :, offsets] = key
    value_cache[blocks, :, offsets] = value
