"""Vectors as 8-bit codes with one scale each, inside a kernel."""

# triton-lang functions: constants are upper case, and what a GPU computes has no Python type.
# ruff: noqa: N803, N806
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

from naiad_kernels.store_kv.quantize import LARGEST_CODE, SMALLEST_MAGNITUDE

_LARGEST_INT8 = tl.constexpr(LARGEST_CODE[torch.int8])
_LARGEST_FLOAT8 = tl.constexpr(LARGEST_CODE[torch.float8_e4m3fn])
_SMALLEST_MAGNITUDE = tl.constexpr(SMALLEST_MAGNITUDE)


@triton.jit
def scale_of(largest, not_finite, CODE: tl.constexpr):
    """Scales of vectors with these largest magnitudes; `not_finite`: the sums of values times 0.

    A maximum drops NaN on a GPU, a sum does not.
    """
    LARGEST_CODE: tl.constexpr = _LARGEST_INT8 if CODE.is_int8() else _LARGEST_FLOAT8
    return tl.div_rn(tl.maximum(largest, _SMALLEST_MAGNITUDE), LARGEST_CODE) + not_finite


@triton.jit
def encode(x, scale, CODE: tl.constexpr):
    """Codes of `x`, float32, rounded to the nearest; exact division, so that every device agrees."""
    LARGEST_CODE: tl.constexpr = _LARGEST_INT8 if CODE.is_int8() else _LARGEST_FLOAT8
    scaled = tl.clamp(tl.div_rn(x, scale), -LARGEST_CODE, LARGEST_CODE)
    if CODE.is_int8():
        scaled = tl.floor(scaled + 0.5)
    return scaled.to(CODE)
