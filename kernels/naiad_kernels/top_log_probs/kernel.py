"""`top_log_probs` on a GPU: the best tokens and the sum of each tile of the vocabulary, then of a row."""

# triton-lang functions: constants are upper case, and what a GPU computes has no Python type.
# ruff: noqa: N803
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

_TILE = 1024
_KEYS_PER_WARP = 512
_MAX_WARPS = 16
_MAGNITUDE_BITS = tl.constexpr((1 << 31) - 1)
_LOWEST_KEY = tl.constexpr(-(1 << 63))


@triton.jit
def _rank_key(logits, token_ids):
    """An int64 for each token, greater for one that comes first; no two are equal."""
    # Zeros of both signs are equal tokens.
    bits = tl.where(logits == 0.0, 0.0, logits).to(tl.int32, bitcast=True)
    comparable = bits ^ ((bits >> 31) & _MAGNITUDE_BITS)
    return (comparable.to(tl.int64) << 32) | (token_ids ^ _MAGNITUDE_BITS).to(tl.int64)


@triton.jit(do_not_specialize=["num_tiles", "num_top"])
def _tile_log_probs_kernel(
    tile_keys_ptr,  # [num_rows, num_tiles, num_top] int64
    tile_max_ptr,  # [num_rows, num_tiles] float32
    tile_sum_ptr,  # [num_rows, num_tiles] float32, of exp(logit - maximum)
    logits_ptr,  # [num_rows, VOCAB_SIZE] float32
    num_tiles,
    num_top,
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
    top = tl.max(logits, axis=0)
    # A tile without a possible token must not compute inf - inf.
    total = tl.sum(tl.exp(logits - tl.where(top == float("-inf"), 0.0, top)), axis=0)
    place = row * num_tiles + tile
    tl.store(tile_max_ptr + place, top)
    tl.store(tile_sum_ptr + place, total)
    keys = tl.where(is_token, _rank_key(logits, token_ids), _LOWEST_KEY)
    for rank in tl.range(0, num_top):
        best = tl.max(keys, axis=0)
        tl.store(tile_keys_ptr + place * num_top + rank, best)
        keys = tl.where(keys == best, _LOWEST_KEY, keys)


@triton.jit(do_not_specialize=["num_tiles", "num_top"])
def _row_log_probs_kernel(
    chosen_out_ptr,  # [num_rows] float32
    top_ids_ptr,  # [num_rows, num_top] int64
    top_out_ptr,  # [num_rows, num_top] float32
    tile_keys_ptr,  # [num_rows, num_tiles, num_top] int64
    tile_max_ptr,  # [num_rows, num_tiles] float32
    tile_sum_ptr,  # [num_rows, num_tiles] float32
    logits_ptr,  # [num_rows, vocab_size] float32
    chosen_ids_ptr,  # [num_rows] int64
    num_tiles,
    num_top,
    stride_row: tl.int64,
    TILE_TILES: tl.constexpr,
    TILE_KEYS: tl.constexpr,
):
    """Grid (num_rows,)."""
    row = tl.program_id(0).to(tl.int64)
    tiles = tl.arange(0, TILE_TILES)
    is_tile = tiles < num_tiles
    maxima = tl.load(tile_max_ptr + row * num_tiles + tiles, mask=is_tile, other=float("-inf"))
    sums = tl.load(tile_sum_ptr + row * num_tiles + tiles, mask=is_tile, other=0.0)
    top = tl.max(maxima, axis=0)
    total = tl.sum((sums * tl.exp(maxima - top)).to(tl.float64), axis=0)
    log_sum = top.to(tl.float64) + tl.log(total)
    row_ptr = logits_ptr + row * stride_row
    chosen = tl.load(row_ptr + tl.load(chosen_ids_ptr + row))
    tl.store(chosen_out_ptr + row, (chosen.to(tl.float64) - log_sum).to(tl.float32))
    lanes = tl.arange(0, TILE_KEYS)
    num_keys = num_tiles * num_top
    keys = tl.load(tile_keys_ptr + row * num_keys + lanes, mask=lanes < num_keys, other=_LOWEST_KEY)
    for rank in tl.range(0, num_top):
        best = tl.max(keys, axis=0)
        keys = tl.where(keys == best, _LOWEST_KEY, keys)
        token_id = (best & _MAGNITUDE_BITS) ^ _MAGNITUDE_BITS
        logit = tl.load(row_ptr + token_id).to(tl.float64)
        tl.store(top_ids_ptr + row * num_top + rank, token_id)
        tl.store(top_out_ptr + row * num_top + rank, (logit - log_sum).to(tl.float32))


def top_log_probs(
    logits: torch.Tensor, chosen_ids: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See the public op."""
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    num_rows, vocab_size = logits.shape
    num_tiles = triton.cdiv(vocab_size, _TILE)
    chosen = torch.empty(num_rows, device=logits.device)
    top_ids = torch.empty((num_rows, num_top), dtype=torch.int64, device=logits.device)
    top = torch.empty(top_ids.shape, device=logits.device)
    if num_rows == 0:
        return chosen, top_ids, top
    keys = torch.empty((num_rows, num_tiles, num_top), dtype=torch.int64, device=logits.device)
    maxima, sums = (torch.empty((num_rows, num_tiles), device=logits.device) for _ in range(2))
    _tile_log_probs_kernel[(num_rows, num_tiles)](
        keys, maxima, sums, logits, num_tiles, num_top, logits.stride(0),
        VOCAB_SIZE=vocab_size, TILE=_TILE, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    tile_keys = triton.next_power_of_2(max(1, num_tiles * num_top))
    _row_log_probs_kernel[(num_rows,)](
        chosen, top_ids, top, keys, maxima, sums, logits, chosen_ids.contiguous(),
        num_tiles, num_top, logits.stride(0),
        TILE_TILES=triton.next_power_of_2(num_tiles), TILE_KEYS=tile_keys,
        num_warps=max(4, min(_MAX_WARPS, tile_keys // _KEYS_PER_WARP)), enable_fp_fusion=False,
    )  # fmt: skip
    return chosen, top_ids, top
