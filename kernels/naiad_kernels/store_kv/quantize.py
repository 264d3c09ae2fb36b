"""Quantizes vectors to 8-bit codes with one scale each, and back, in plain torch."""

from __future__ import annotations

import torch

# The largest code of each dtype, which represents a vector's largest magnitude.
LARGEST_CODE = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
# A zero vector's scale must not be 0, because the vector is divided by it.
SMALLEST_MAGNITUDE = 1e-30


def quantize(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize every last-dimension vector to codes and a scale.

    Args:
        x: `[..., dim]`, any floating dtype.
        dtype: the codes' dtype, int8 or float8_e4m3fn.

    Returns:
        `[..., dim]` codes and `[...]` float32 scales. A vector with a value that is not finite has
        a scale of NaN.
    """
    largest_code = LARGEST_CODE[dtype]
    wide = x.float()
    # The sum is 0 for finite values, else NaN.
    not_finite = (wide * 0).sum(-1)
    scale = wide.abs().amax(-1).clamp_min(SMALLEST_MAGNITUDE) / largest_code + not_finite
    codes = (wide / scale.unsqueeze(-1)).clamp(-largest_code, largest_code)
    if dtype == torch.int8:
        codes = torch.floor(codes.nan_to_num() + 0.5)
    return codes.to(dtype), scale


def dequantize(codes: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Convert codes back to vectors in `dtype`; without a scale they are returned unchanged."""
    if scale is None:
        return codes
    return (codes.float() * scale.unsqueeze(-1)).to(dtype)
