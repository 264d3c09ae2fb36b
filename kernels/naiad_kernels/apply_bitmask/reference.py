"""Makes tokens impossible, as plain torch."""

from __future__ import annotations

import torch


def apply_bitmask(logits: torch.Tensor, rows: torch.Tensor, allowed: torch.Tensor) -> None:
    """Mask, in place; see `naiad_kernels.apply_bitmask.apply_bitmask`. `rows` is int64 on any device."""
    token_ids = torch.arange(logits.shape[1], device=logits.device)
    is_allowed = (allowed.to(logits.device)[:, token_ids // 32] >> (token_ids % 32)) & 1 == 1
    logits[rows] = logits[rows].masked_fill(~is_allowed, float("-inf"))
