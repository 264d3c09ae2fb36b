"""`linear` on a GPU such that a token's result does not depend on the other tokens of the step.

Libraries choose their tiles, and so the order of summation, by the number of tokens. Here every step
uses the same tiles, a program sums over the whole input in one order, and the rows of a tile are
independent.
"""

# triton-lang functions: constants are upper case, and GPU values have no Python types.
# ruff: noqa: N803
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

# By bytes per element: tokens, outputs and inputs of a tile, and the number of tiles in flight.
_TILES = {2: (64, 64, 64, 4), 4: (32, 32, 32, 2)}


@triton.jit(do_not_specialize=["num_tokens"])
def _fixed_order_linear_kernel(
    out_ptr,  # [num_tokens, OUT]
    x_ptr,  # [num_tokens, IN]
    matrix_ptr,  # [OUT, IN]
    bias_ptr,  # [OUT], or None
    num_tokens,
    stride_token: tl.int64,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    TILE_OUT: tl.constexpr,
    TILE_IN: tl.constexpr,
):
    """Grid (OUT / TILE_OUT, num_tokens / TILE_TOKENS)."""
    columns = (tl.program_id(0) * TILE_OUT + tl.arange(0, TILE_OUT)).to(tl.int64)
    tokens = (tl.program_id(1) * TILE_TOKENS + tl.arange(0, TILE_TOKENS)).to(tl.int64)
    is_token, is_column = tokens < num_tokens, columns < OUT
    accumulated = tl.zeros([TILE_TOKENS, TILE_OUT], dtype=tl.float32)
    for first in tl.range(0, IN, TILE_IN):
        places = first + tl.arange(0, TILE_IN)
        is_place = places < IN
        x_mask = is_token[:, None] & is_place[None, :]
        x = tl.load(x_ptr + tokens[:, None] * stride_token + places[None, :], mask=x_mask, other=0.0)
        matrix_mask = is_place[:, None] & is_column[None, :]
        matrix = tl.load(matrix_ptr + columns[None, :] * IN + places[:, None], mask=matrix_mask, other=0.0)
        accumulated = tl.dot(x, matrix, accumulated, input_precision="ieee")
    if bias_ptr is not None:
        accumulated += tl.load(bias_ptr + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    out_rows = out_ptr + tokens[:, None] * OUT + columns[None, :]
    result = accumulated.to(out_ptr.dtype.element_ty)
    tl.store(out_rows, result, mask=is_token[:, None] & is_column[None, :])


def linear(x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Compute x · matrixᵀ + bias.

    Args:
        x: `[num_tokens, in_features]`, any strides.
        matrix: `[out_features, in_features]`, contiguous.
        bias: `[out_features]`, or None.

    Returns:
        `[num_tokens, out_features]`, dtype of `x`.
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    num_tokens, num_in = x.shape
    num_out = matrix.shape[0]
    out = torch.empty((num_tokens, num_out), dtype=x.dtype, device=x.device)
    if num_tokens == 0:
        return out
    tile_tokens, tile_out, tile_in, num_stages = _TILES[x.element_size()]
    grid = (triton.cdiv(num_out, tile_out), triton.cdiv(num_tokens, tile_tokens))
    _fixed_order_linear_kernel[grid](
        out, x, matrix, bias, num_tokens, x.stride(0),
        IN=num_in, OUT=num_out, TILE_TOKENS=tile_tokens, TILE_OUT=tile_out, TILE_IN=tile_in,
        num_warps=4, num_stages=num_stages, enable_fp_fusion=True,
    )  # fmt: skip
    return out
