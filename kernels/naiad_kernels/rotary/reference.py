"""Reference for `rotary`, in plain float32 torch."""

from __future__ import annotations

import torch


def rotary(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """Compute the public op: (x₁, x₂) → (x₁ cos − x₂ sin, x₂ cos + x₁ sin)."""
    half = x.shape[-1] // 2
    x1, x2 = x[..., :half].float(), x[..., half:].float()
    cos_half, sin_half = cos[..., :half].float(), signed_sin[..., half:].float()
    rotated = torch.cat((x1 * cos_half - x2 * sin_half, x2 * cos_half + x1 * sin_half), dim=-1)
    return rotated.to(x.dtype)
