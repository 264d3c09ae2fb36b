"""Root-mean-square normalisation."""

from __future__ import annotations

import torch

from naiad_kernels.rms_norm import cpu, reference

__all__ = ["rms_norm"]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Scale every last-dimension vector of `x` to root mean square 1, then by `weight`.

    Args:
        x: `[..., dim]`, any floating dtype, any strides.
        weight: `[dim]`, or any shape that broadcasts to `x` (one row per head, say); dtype of `x`.
        eps: added to the mean square.

    Returns:
        A new tensor of the shape and dtype of `x`; computed in float32.
    """
    assert weight.shape[-1] == x.shape[-1], (weight.shape, x.shape)
    assert weight.dtype == x.dtype, (weight.dtype, x.dtype)
    if x.device.type == "cpu" and x.dtype == torch.float32:
        return cpu.rms_norm(x, weight, eps)
    return reference.rms_norm(x, weight, eps)
