"""`silu_and_mul` and its siblings on a GPU: a program computes a tile of one token's row."""

# triton-lang functions: constants are upper case, and GPU values have no Python types.
# ruff: noqa: N803
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

_MAX_TILE = 1024
_SQRT_HALF = tl.constexpr(math.sqrt(0.5))
_TWO_SQRT_TWO_OVER_PI = tl.constexpr(2 * math.sqrt(2 / math.pi))
ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


@triton.jit
def _activate_and_mul_kernel(
    out_ptr,  # [num_tokens, DIM]
    gate_up_ptr,  # [num_tokens, 2 * DIM]
    stride_token: tl.int64,
    ACTIVATION: tl.constexpr,
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
    if ACTIVATION == "silu":
        active = gate * tl.sigmoid(gate)
    elif ACTIVATION == "gelu":
        active = 0.5 * gate * (1.0 + tl.erf(gate * _SQRT_HALF))
    else:
        # (1 + tanh z) / 2 is the sigmoid of 2 z.
        cubic = gate + 0.044715 * gate * gate * gate
        active = gate * tl.sigmoid(cubic * _TWO_SQRT_TWO_OVER_PI)
    result = active * up
    tl.store(out_ptr + token * DIM + columns, result.to(out_ptr.dtype.element_ty), mask=mask)


def activate_and_mul(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """Launch the kernel of both public ops; `activation` is one of `ACTIVATIONS`."""
    assert activation in ACTIVATIONS, activation
    rows = gate_up.reshape(-1, gate_up.shape[-1])
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    num_tokens, dim = len(rows), rows.shape[1] // 2
    out = torch.empty((*gate_up.shape[:-1], dim), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel() == 0:
        return out
    tile = min(_MAX_TILE, triton.next_power_of_2(dim))
    _activate_and_mul_kernel[(num_tokens, triton.cdiv(dim, tile))](
        out, rows, rows.stride(0),
        ACTIVATION=activation, DIM=dim, TILE=tile, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    return out
