"""`rotary` on a GPU: a program rotates several heads of one token."""

# triton-lang functions: constants are upper case, and GPU values have no Python types.
# ruff: noqa: N803
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

_TILE_ELEMENTS = 1024


@triton.jit
def _rotary_kernel(
    out_ptr,  # [num_tokens, NUM_HEADS, 2 * HALF]
    x_ptr,  # [num_tokens, NUM_HEADS, 2 * HALF]
    cos_ptr,  # [num_tokens, 2 * HALF]
    signed_sin_ptr,  # [num_tokens, 2 * HALF]
    stride_token: tl.int64,
    stride_head: tl.int64,
    NUM_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    TILE_HALF: tl.constexpr,
):
    """Grid (num_tokens, NUM_HEADS / TILE_HEADS); the halves of a head are loaded as two tiles."""
    token = tl.program_id(0).to(tl.int64)
    heads = (tl.program_id(1) * TILE_HEADS + tl.arange(0, TILE_HEADS))[:, None]
    columns = tl.arange(0, TILE_HALF)[None, :]
    is_column = columns < HALF
    mask = (heads < NUM_HEADS) & is_column
    angle_row = token * 2 * HALF
    cos = tl.load(cos_ptr + angle_row + columns, mask=is_column, other=0.0).to(tl.float32)
    sin = tl.load(signed_sin_ptr + angle_row + HALF + columns, mask=is_column, other=0.0).to(tl.float32)
    first_ptr = x_ptr + token * stride_token + heads * stride_head + columns
    first = tl.load(first_ptr, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(first_ptr + HALF, mask=mask, other=0.0).to(tl.float32)
    out_row_ptr = out_ptr + (token * NUM_HEADS + heads) * 2 * HALF + columns
    tl.store(out_row_ptr, (first * cos - second * sin).to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(out_row_ptr + HALF, (second * cos + first * sin).to(out_ptr.dtype.element_ty), mask=mask)


def rotary(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """Launch the kernel of the public op."""
    x = x if x.stride(2) == 1 else x.contiguous()
    num_tokens, num_heads, head_dim = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    tile_half = triton.next_power_of_2(head_dim // 2)
    tile_heads = min(triton.next_power_of_2(num_heads), max(1, _TILE_ELEMENTS // tile_half))
    _rotary_kernel[(num_tokens, triton.cdiv(num_heads, tile_heads))](
        out,
        x,
        cos.contiguous(),
        signed_sin.contiguous(),
        x.stride(0),
        x.stride(1),
        NUM_HEADS=num_heads,
        HALF=head_dim // 2,
        TILE_HEADS=tile_heads,
        TILE_HALF=tile_half,
        num_warps=4,
        enable_fp_fusion=True,
    )
    return out
