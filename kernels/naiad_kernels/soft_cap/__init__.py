"""A bound on logits that has no edge."""

from __future__ import annotations

import torch

from naiad_kernels.recording import recordable

__all__ = ["soft_cap"]


@recordable
def soft_cap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """Bend numbers so that none is larger than the cap: cap · tanh(x / cap).

    Args:
        x: float32, any shape; overwritten.
        cap: > 0.

    Returns:
        `x`.
    """
    return x.div_(cap).tanh_().mul_(cap)
