"""Quantizes activations to eight bits: a program scales one token's groups to the range of int8 or FP8."""

# triton-lang functions: constants are upper case, and GPU values have no Python types.
# ruff: noqa: N803, N806
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

from naiad_kernels.linear.quantised import reference

_LARGEST_INT8 = tl.constexpr(reference.LARGEST[torch.int8])
_LARGEST_FP8 = tl.constexpr(reference.LARGEST[torch.float8_e4m3fn])


@triton.jit
def quantize_tokens_kernel(
    values_ptr,  # [num_tokens, DIM] int8 or float8e4nv
    scales_ptr,  # [num_groups, num_tokens] float32
    x_ptr,  # [num_tokens, DIM]
    stride_x: tl.int64,
    DIM: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    TILE_GROUPS: tl.constexpr,
    TILE_INPUTS: tl.constexpr,
):
    """Grid (num_tokens,)."""
    CODE: tl.constexpr = values_ptr.dtype.element_ty
    LARGEST: tl.constexpr = _LARGEST_INT8 if CODE.is_int8() else _LARGEST_FP8
    token = tl.program_id(0).to(tl.int64)
    groups = tl.arange(0, TILE_GROUPS)
    within = tl.arange(0, TILE_INPUTS)
    columns = groups[:, None] * GROUP_SIZE + within[None, :]
    mask = (within < GROUP_SIZE)[None, :] & (columns < DIM)
    x = tl.load(x_ptr + token * stride_x + columns, mask=mask, other=0.0).to(tl.float32)
    # 0 · x is NaN for NaN and infinity; a maximum would ignore NaN.
    scales = tl.div_rn(tl.max(tl.abs(x), axis=1), LARGEST) + tl.sum(x * 0.0, axis=1)
    # A 16-bit input over such a scale often lies halfway between two codes, so the last bit counts.
    divisors = tl.where(scales > 0.0, scales, 1.0)[:, None]
    values = tl.clamp(tl.div_rn(x, divisors), -LARGEST, LARGEST)
    if CODE.is_int8():
        values = tl.floor(values + 0.5)
    tl.store(values_ptr + token * DIM + columns, values.to(CODE), mask=mask)
    tl.store(scales_ptr + groups * tl.num_programs(0) + token, scales, mask=groups * GROUP_SIZE < DIM)
