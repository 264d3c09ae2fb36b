"""The best token of each row, as plain torch."""

from __future__ import annotations

import torch


def best_tokens(logits: torch.Tensor, allowed: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Find each row's best allowed token; see `naiad_kernels.best_tokens.best_tokens`."""
    token_ids = torch.arange(logits.shape[1], device=logits.device)
    is_allowed = torch.ones_like(logits, dtype=torch.bool)
    if allowed is not None:
        assert allowed.dtype == torch.int32, allowed.dtype
        assert allowed.shape[0] == len(logits), (allowed.shape, logits.shape)
        assert allowed.shape[1] * 32 >= logits.shape[1], (allowed.shape, logits.shape)
        is_allowed = (allowed[:, token_ids // 32] >> (token_ids % 32)) & 1 == 1
    values = logits.masked_fill(~is_allowed, float("-inf"))
    greatest = values.amax(dim=1)  # NaN if there is one
    is_best = torch.where(
        greatest.isnan().unsqueeze(1), values.isnan(), (values == greatest.unsqueeze(1)) & is_allowed
    )
    lowest = torch.where(is_best, token_ids, logits.shape[1]).amin(dim=1)
    return torch.where(is_best.any(dim=1), lowest, -1), greatest
