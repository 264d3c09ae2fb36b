"""Reference for `kept_threshold`, with a sort in plain torch."""

from __future__ import annotations

import torch


def kept_threshold(
    logits: torch.Tensor,
    best: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    log_min_p: torch.Tensor,
) -> torch.Tensor:
    """Compute the public op in float64."""
    values = (logits.double() - best[:, None]) / temperature[:, None]
    values = values.sort(dim=1, descending=True).values
    kth = values.gather(1, (top_k[:, None] - 1).clamp(min=0))
    by_top_k = torch.where(top_k[:, None] > 0, kth, -torch.inf)
    masses = values.exp().masked_fill(values < by_top_k, 0)
    cumulated = masses.cumsum(1)
    # A token is needed if the better ones do not reach the mass; the best one always is.
    needed = cumulated - masses < top_p[:, None] * cumulated[:, -1:]
    last_needed = values.gather(1, (needed.sum(1, keepdim=True) - 1).clamp(min=0))
    by_top_p = torch.where(top_p[:, None] < 1, last_needed, -torch.inf)
    return torch.maximum(torch.maximum(by_top_k, by_top_p)[:, 0], log_min_p)
