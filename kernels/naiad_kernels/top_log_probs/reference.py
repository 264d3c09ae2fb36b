"""What `top_log_probs` computes, with a sort in plain torch."""

from __future__ import annotations

import torch


def top_log_probs(
    logits: torch.Tensor, chosen_ids: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See the public op; float64 arithmetic, rounded once."""
    log_probs = logits.double().log_softmax(1).float()
    top_ids = logits.sort(dim=1, descending=True, stable=True).indices[:, :num_top]
    return log_probs.gather(1, chosen_ids[:, None])[:, 0], top_ids, log_probs.gather(1, top_ids)
