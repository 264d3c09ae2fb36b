"""Reference for `rms_norm`, in plain float32 torch."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Compute the public op."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight.dtype == x.dtype:
        normed = normed.to(x.dtype)
    return (normed * weight).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the public op; the sum is rounded to x's dtype before it is normalised."""
    total = (x.float() + residual.float()).to(x.dtype)
    return rms_norm(total, weight, eps), total
