"""`silu_and_mul` on a GPU: a program computes a tile of one token's row."""

# triton-lang functions: constants are upper case, and what a GPU computes has no Python type.
# ruff: noqa: N803
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

_MAX_TILE = 1024


@triton.jit
def _silu_and_mul_kernel(
    out_ptr,  # [num_tokens, DIM]
    gate_up_ptr,  # [num_tokens, 2 * DIM]
    stride_token: tl.int64,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid (num_tokens, DIM / TILE)."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = columns < DIM
    row_ptr = gate_up_ptr + token * stride_token
    gate = tl.load(row_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(row_ptr + DIM + columns, mask=mask, other=0.0).to(tl.float32)
    result = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + token * DIM + columns, result.to(out_ptr.dtype.element_ty), mask=mask)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See the public op."""
    rows = gate_up.reshape(-1, gate_up.shape[-1])
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    num_tokens, dim = len(rows), rows.shape[1] // 2
    out = torch.empty((*gate_up.shape[:-1], dim), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel() == 0:
        return out
    tile = min(_MAX_TILE, triton.next_power_of_2(dim))
    _silu_and_mul_kernel[(num_tokens, triton.cdiv(dim, tile))](
        out, rows, rows.stride(0), DIM=dim, TILE=tile, num_warps=4, enable_fp_fusion=True
    )
    return out
