"""Quantizes activations to FP8: a program scales one token's values to FP8's range."""

# triton-lang functions: constants are upper case, and GPU values have no Python types.
# ruff: noqa: N803
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from naiad_kernels.linear.quantised import reference

_LARGEST = tl.constexpr(reference.LARGEST_FP8)


@triton.jit
def quantize_tokens_kernel(
    values_ptr,  # [num_tokens, DIM] float8e4nv
    scales_ptr,  # [num_tokens] float32
    x_ptr,  # [num_tokens, DIM]
    stride_x: tl.int64,
    DIM: tl.constexpr,
    TILE_DIM: tl.constexpr,
):
    """Grid (num_tokens,)."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, TILE_DIM)
    mask = columns < DIM
    x = tl.load(x_ptr + token * stride_x + columns, mask=mask, other=0.0).to(tl.float32)
    # 0 · x is NaN for NaN and infinity; a maximum would ignore NaN.
    scale = tl.max(tl.abs(x), axis=0) / _LARGEST + tl.sum(x * 0.0, axis=0)
    values = tl.clamp(x / tl.where(scale > 0.0, scale, 1.0), -_LARGEST, _LARGEST)
    tl.store(values_ptr + token * DIM + columns, values.to(tl.float8e4nv), mask=mask)
    tl.store(scales_ptr + token, scale)
