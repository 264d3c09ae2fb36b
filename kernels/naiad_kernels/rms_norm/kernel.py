"""`rms_norm` and `add_rms_norm` on a GPU: a program computes one long row or several short ones."""

# triton-lang functions: constants are upper case, and GPU values have no Python types.
# ruff: noqa: N803
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Elements of a program's tile: one row of hidden states, or several heads.
_TILE_ELEMENTS = 1024
_MAX_WARPS = 16
_ELEMENTS_PER_WARP = 512


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    out_ptr,  # [num_rows, DIM]
    sum_ptr,  # [num_rows, DIM], written if HAS_RESIDUAL
    x_ptr,  # [num_rows / NUM_HEADS, NUM_HEADS, DIM]
    residual_ptr,  # [num_rows, DIM], read if HAS_RESIDUAL
    weight_ptr,  # [DIM] or [NUM_HEADS, DIM]
    num_rows,
    stride_token: tl.int64,
    stride_head: tl.int64,
    eps: tl.float32,
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HAS_HEAD_WEIGHTS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_DIM: tl.constexpr,
):
    """Each program normalises TILE_ROWS whole rows; a row is one head of one token."""
    rows = (tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)).to(tl.int64)[:, None]
    columns = tl.arange(0, TILE_DIM)[None, :]
    mask = (rows < num_rows) & (columns < DIM)
    heads = rows % NUM_HEADS
    x = tl.load(
        x_ptr + rows // NUM_HEADS * stride_token + heads * stride_head + columns, mask=mask, other=0.0
    )
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + rows * DIM + columns, mask=mask, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(out_ptr.dtype.element_ty)
        tl.store(sum_ptr + rows * DIM + columns, x, mask=mask)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=1, keep_dims=True) / DIM + eps)
    normed = wide * scale
    if weight_ptr.dtype.element_ty == out_ptr.dtype.element_ty:
        normed = normed.to(out_ptr.dtype.element_ty).to(tl.float32)
    weight_row = heads * DIM if HAS_HEAD_WEIGHTS else rows * 0
    weight = tl.load(weight_ptr + weight_row + columns, mask=mask, other=0.0)
    result = normed * weight.to(tl.float32)
    tl.store(out_ptr + rows * DIM + columns, result.to(out_ptr.dtype.element_ty), mask=mask)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Launch the kernel of the public op."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(out, None, _with_dense_rows(x), None, weight, eps)
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernel of the public op."""
    out, total = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    _launch(out, total, _with_dense_rows(x), residual.contiguous(), weight, eps)
    return out, total


def _with_dense_rows(x: torch.Tensor) -> torch.Tensor:
    """Reshape to `[num_tokens, num_heads, dim]` with contiguous rows; usually a view."""
    shaped = x.unsqueeze(-2) if x.dim() <= 2 else x
    shaped = shaped.reshape(-1, *shaped.shape[-2:])
    return shaped if shaped.stride(2) == 1 else shaped.contiguous()


def _launch(
    out: torch.Tensor,
    total: torch.Tensor | None,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
) -> None:
    num_tokens, num_heads, dim = x.shape
    num_rows = num_tokens * num_heads
    if num_rows == 0:
        return
    tile_dim = triton.next_power_of_2(dim)
    tile_rows = max(1, _TILE_ELEMENTS // tile_dim) if num_heads > 1 else 1
    has_head_weights = weight.dim() > 1 and weight.shape[-2] > 1
    assert weight.numel() == (num_heads * dim if has_head_weights else dim), (weight.shape, x.shape)
    _rms_norm_kernel[(triton.cdiv(num_rows, tile_rows),)](
        out,
        total,
        x,
        residual,
        weight.contiguous(),
        num_rows,
        x.stride(0),
        x.stride(1),
        eps,
        NUM_HEADS=num_heads,
        DIM=dim,
        HAS_HEAD_WEIGHTS=has_head_weights,
        HAS_RESIDUAL=residual is not None,
        TILE_ROWS=tile_rows,
        TILE_DIM=tile_dim,
        num_warps=max(1, min(_MAX_WARPS, tile_rows * tile_dim // _ELEMENTS_PER_WARP)),
        enable_fp_fusion=True,
    )
