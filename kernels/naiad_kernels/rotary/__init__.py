"""Rotary position embedding, for heads whose two halves form the rotated pairs."""

from __future__ import annotations

import torch

from naiad_kernels.recording import recordable
from naiad_kernels.rotary import cpu, reference

__all__ = ["rotary", "rotary_angles"]


@recordable
def rotary_angles(
    positions: torch.Tensor, inv_freq: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute cosines and signed sines of a step's tokens, shared by all layers.

    Args:
        positions: `[num_tokens]` int64.
        inv_freq: `[head_dim / 2]` float32, radians per position.
        dtype: the result's dtype; the angles are computed in float32.

    Returns:
        cos and signed_sin, each `[num_tokens, 1, head_dim]`: cos = (cos, cos) and
        signed_sin = (−sin, sin) over the two halves.
    """
    angles = positions[:, None, None].float() * inv_freq
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotary(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """Rotate every head of every token by its position's angles.

    Args:
        x: `[num_tokens, num_heads, head_dim]`, any strides; queries and keys together.
        cos: from `rotary_angles`, dtype of `x`.
        signed_sin: from `rotary_angles`, dtype of `x`.

    Returns:
        A new tensor of the shape and dtype of `x`.
    """
    assert x.shape[-1] == cos.shape[-1] == signed_sin.shape[-1], (x.shape, cos.shape)
    assert len(x) == len(cos) == len(signed_sin), (x.shape, cos.shape)
    if x.device.type == "cpu" and x.dtype == torch.float32:
        return cpu.rotary(x, cos, signed_sin)
    if x.device.type == "cuda":
        from naiad_kernels.rotary import kernel

        return kernel.rotary(x, cos, signed_sin)
    return reference.rotary(x, cos, signed_sin)
