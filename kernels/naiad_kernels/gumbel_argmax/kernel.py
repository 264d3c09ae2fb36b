"""`gumbel_argmax` on a GPU: the best of each tile of the vocabulary, then the best of those."""

# triton-lang functions: constants are upper case, and GPU values have no Python types.
# ruff: noqa: N803
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

_TILE = 1024

# SplitMix64 (Steele, Lea, Flood 2014).
_STEP = tl.constexpr(0x9E3779B97F4A7C15)
_FACTOR_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_FACTOR_2 = tl.constexpr(0x94D049BB133111EB)
_UNIFORM_STEP = tl.constexpr(2.0**-53)


@triton.jit
def uniform_noise(key, token_ids):
    """Uniform noise in (0, 1), float64, for `token_ids` in a row with this `key` (int64)."""
    bits = token_ids.to(tl.uint64) * _STEP + key.to(tl.uint64)
    bits = (bits ^ (bits >> 30)) * _FACTOR_1
    bits = (bits ^ (bits >> 27)) * _FACTOR_2
    bits = bits ^ (bits >> 31)
    uniform = ((bits >> 11).to(tl.float64) + 0.5) * _UNIFORM_STEP
    # A half more than the largest number rounds up to 1.
    return uniform - (uniform == 1.0).to(tl.float64) * _UNIFORM_STEP


@triton.jit
def gumbel_noise(key, token_ids):
    """Standard Gumbel noise, float64, for `token_ids` in a row with this `key` (int64)."""
    uniform = uniform_noise(key, token_ids)
    # log1p(-u), although 1 - u loses digits: Kahan's method corrects for the rounding.
    rounded = 1.0 - uniform
    is_one = rounded == 1.0
    ratio = -uniform / tl.where(is_one, 1.0, rounded - 1.0)
    log1p = tl.where(is_one, -uniform, tl.log(rounded) * ratio)
    return -tl.log(-log1p)


@triton.jit(do_not_specialize=["num_tiles"])
def _best_of_tile_kernel(
    tile_scores_ptr,  # [num_rows, num_tiles] float64
    tile_ids_ptr,  # [num_rows, num_tiles] int64
    logits_ptr,  # [num_rows, VOCAB_SIZE] float32
    best_ptr,  # [num_rows] float32
    temperature_ptr,  # [num_rows] float64
    threshold_ptr,  # [num_rows] float64
    keys_ptr,  # [num_rows] int64
    num_tiles,
    stride_row: tl.int64,
    VOCAB_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid (num_rows, num_tiles)."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    token_ids = tile * TILE + tl.arange(0, TILE)
    is_token = token_ids < VOCAB_SIZE
    logits = tl.load(logits_ptr + row * stride_row + token_ids, mask=is_token, other=float("-inf"))
    best = tl.load(best_ptr + row).to(tl.float64)
    scaled = (logits.to(tl.float64) - best) / tl.load(temperature_ptr + row)
    scores = scaled + gumbel_noise(tl.load(keys_ptr + row), token_ids)
    scores = tl.where(is_token & (scaled >= tl.load(threshold_ptr + row)), scores, float("-inf"))
    top, index = tl.max(scores, axis=0, return_indices=True)
    tl.store(tile_scores_ptr + row * num_tiles + tile, top)
    tl.store(tile_ids_ptr + row * num_tiles + tile, (tile * TILE + index).to(tl.int64))


@triton.jit(do_not_specialize=["num_tiles"])
def _best_of_row_kernel(
    out_ptr,  # [num_rows] int64
    tile_scores_ptr,  # [num_rows, num_tiles] float64
    tile_ids_ptr,  # [num_rows, num_tiles] int64
    num_tiles,
    TILE_TILES: tl.constexpr,
):
    """Grid (num_rows,)."""
    row = tl.program_id(0).to(tl.int64)
    tiles = tl.arange(0, TILE_TILES)
    scores = tl.load(tile_scores_ptr + row * num_tiles + tiles, mask=tiles < num_tiles, other=float("-inf"))
    # With NaN, argmax may return an index past the last tile.
    tile = tl.minimum(tl.argmax(scores, axis=0), num_tiles - 1)
    tl.store(out_ptr + row, tl.load(tile_ids_ptr + row * num_tiles + tile))


def gumbel_argmax(
    logits: torch.Tensor,
    best: torch.Tensor,
    temperature: torch.Tensor,
    threshold: torch.Tensor,
    keys: torch.Tensor,
) -> torch.Tensor:
    """Launch the kernel of the public op."""
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    num_rows, vocab_size = logits.shape
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return out
    num_tiles = triton.cdiv(vocab_size, _TILE)
    tile_scores = torch.empty((num_rows, num_tiles), dtype=torch.float64, device=logits.device)
    tile_ids = torch.empty((num_rows, num_tiles), dtype=torch.int64, device=logits.device)
    _best_of_tile_kernel[(num_rows, num_tiles)](
        tile_scores, tile_ids, logits, best.contiguous(), temperature.contiguous(),
        threshold.contiguous(), keys.contiguous(), num_tiles, logits.stride(0),
        VOCAB_SIZE=vocab_size, TILE=_TILE, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    _best_of_row_kernel[(num_rows,)](
        out, tile_scores, tile_ids, num_tiles,
        TILE_TILES=triton.next_power_of_2(num_tiles), num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out
