"""Quantizes vectors to 8-bit codes with one scale each, inside a kernel."""

# triton-lang functions: constants are upper case, and GPU values have no Python types.
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
    """The scales of vectors with these largest magnitudes.

    `not_finite` is each vector's sum of values times 0. It makes the scale NaN for values that are not
    finite, because a maximum ignores NaN on a GPU.
    """
    LARGEST_CODE: tl.constexpr = _LARGEST_INT8 if CODE.is_int8() else _LARGEST_FLOAT8
    return tl.div_rn(tl.maximum(largest, _SMALLEST_MAGNITUDE), LARGEST_CODE) + not_finite


@triton.jit
def encode(x, scale, CODE: tl.constexpr):
    """The codes of `x`, float32, rounded to nearest; division is exact so that all devices agree."""
    LARGEST_CODE: tl.constexpr = _LARGEST_INT8 if CODE.is_int8() else _LARGEST_FLOAT8
    scaled = tl.clamp(tl.div_rn(x, scale), -LARGEST_CODE, LARGEST_CODE)
    if CODE.is_int8():
        scaled = tl.floor(scaled + 0.5)
    return scaled.to(CODE)
