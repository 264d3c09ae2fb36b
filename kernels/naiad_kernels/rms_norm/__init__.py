"""Root-mean-square normalisation."""

from __future__ import annotations

import torch

from naiad_kernels.recording import recordable
from naiad_kernels.rms_norm import cpu, reference

__all__ = ["add_rms_norm", "rms_norm"]


@recordable
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Scale every last-dimension vector of `x` to root mean square 1, then by `weight`.

    Args:
        x: `[..., dim]`, any floating dtype, any strides.
        weight: `[dim]`, or any shape that broadcasts to `x` (one row per head, say). A weight in the dtype
            of `x` scales the normalised vector after it was rounded to that dtype; with a float32 weight
            only the result is rounded.
        eps: added to the mean square.

    Returns:
        A new tensor of the shape and dtype of `x`; computed in float32.
    """
    assert weight.shape[-1] == x.shape[-1], (weight.shape, x.shape)
    assert weight.dtype in (x.dtype, torch.float32), (weight.dtype, x.dtype)
    if x.device.type == "cpu" and x.dtype == torch.float32:
        return cpu.rms_norm(x, weight, eps)
    if x.device.type == "cuda":
        from naiad_kernels.rms_norm import kernel

        return kernel.rms_norm(x, weight, eps)
    return reference.rms_norm(x, weight, eps)


@recordable
def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalise `x + residual` in one pass, with less memory traffic than a sum followed by `rms_norm`.

    Args:
        x: `[num_tokens, dim]`, any floating dtype.
        residual: same shape and dtype as `x`.
        weight: `[dim]`, as for `rms_norm`.
        eps: added to the mean square.

    Returns:
        `rms_norm` of the sum, and the sum itself rounded to the dtype of `x`; both new tensors.
    """
    assert x.shape == residual.shape, (x.shape, residual.shape)
    assert x.dtype == residual.dtype, (x.dtype, residual.dtype)
    assert weight.dtype in (x.dtype, torch.float32), (weight.dtype, x.dtype)
    assert weight.shape == x.shape[-1:], (weight.shape, x.shape)
    if x.device.type == "cpu" and x.dtype == torch.float32:
        return cpu.add_rms_norm(x, residual, weight, eps)
    if x.device.type == "cuda":
        from naiad_kernels.rms_norm import kernel

        return kernel.add_rms_norm(x, residual, weight, eps)
    return reference.add_rms_norm(x, residual, weight, eps)
