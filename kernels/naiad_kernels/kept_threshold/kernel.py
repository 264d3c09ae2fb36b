"""`kept_threshold` on a GPU: bisection over the bits of a logit, one program per row."""

# triton-lang functions: constants are upper case, and GPU values have no Python types.
# ruff: noqa: N803
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

_MAX_TILE = 4096
_LOWEST_KEY = tl.constexpr(-(1 << 31))
_HIGHEST_KEY = tl.constexpr((1 << 31) - 1)
_MAGNITUDE_BITS = tl.constexpr((1 << 31) - 1)


@triton.jit
def _sort_key(logits):
    """Map float32 to int32 so that the order stays the same."""
    bits = logits.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & _MAGNITUDE_BITS)


@triton.jit
def _num_at_least(row_ptr, key, VOCAB_SIZE: tl.constexpr, TILE: tl.constexpr):
    """Number of tokens whose logit has this key or a greater one."""
    counts = tl.zeros([TILE], dtype=tl.int32)
    for first in tl.range(0, VOCAB_SIZE, TILE):
        token_ids = first + tl.arange(0, TILE)
        is_token = token_ids < VOCAB_SIZE
        logits = tl.load(row_ptr + token_ids, mask=is_token, other=0.0)
        counts += (is_token & (_sort_key(logits) >= key)).to(tl.int32)
    return tl.sum(counts, axis=0)


@triton.jit
def _mass_at_least(row_ptr, key, best, temperature, VOCAB_SIZE: tl.constexpr, TILE: tl.constexpr):
    """The sum of exp((logit - best) / temperature) over tokens with this key or a greater one."""
    masses = tl.zeros([TILE], dtype=tl.float64)
    for first in tl.range(0, VOCAB_SIZE, TILE):
        token_ids = first + tl.arange(0, TILE)
        is_token = token_ids < VOCAB_SIZE
        logits = tl.load(row_ptr + token_ids, mask=is_token, other=0.0)
        is_counted = is_token & (_sort_key(logits) >= key)
        scaled = tl.where(is_counted, (logits - best) / temperature, float("-inf"))
        masses += tl.exp(scaled).to(tl.float64)
    return tl.sum(masses, axis=0)


@triton.jit
def _kept_threshold_kernel(
    out_ptr,  # [num_rows] float64
    logits_ptr,  # [num_rows, VOCAB_SIZE] float32
    best_ptr,  # [num_rows] float32
    temperature_ptr,  # [num_rows] float64
    top_k_ptr,  # [num_rows] int64
    top_p_ptr,  # [num_rows] float64
    log_min_p_ptr,  # [num_rows] float64
    stride_row: tl.int64,
    VOCAB_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid (num_rows,). Top-k reads the row 32 times, top-p 33 times; if both are off it is not read."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride_row
    best = tl.load(best_ptr + row)
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    # 64 bits, so that the middle of two keys does not overflow.
    kept = tl.full([], _LOWEST_KEY, dtype=tl.int64)
    if top_k > 0:
        # The greatest key that top_k tokens reach: that of the k-th best token.
        above = tl.full([], _HIGHEST_KEY, dtype=tl.int64) + 1
        while above - kept > 1:
            middle = (kept + above) >> 1
            if _num_at_least(row_ptr, middle, VOCAB_SIZE, TILE) >= top_k:
                kept = middle
            else:
                above = middle
    if top_p < 1.0:
        # The smallest key with less than the wanted mass above it: that of the last token needed.
        narrow = temperature.to(tl.float32)
        wanted = top_p * _mass_at_least(row_ptr, kept, best, narrow, VOCAB_SIZE, TILE)
        below = kept - 1
        kept = _sort_key(best).to(tl.int64)
        while kept - below > 1:
            middle = (kept + below) >> 1
            if _mass_at_least(row_ptr, middle + 1, best, narrow, VOCAB_SIZE, TILE) < wanted:
                kept = middle
            else:
                below = middle
    key = kept.to(tl.int32)
    logit = (key ^ ((key >> 31) & _MAGNITUDE_BITS)).to(tl.float32, bitcast=True)
    threshold = (logit.to(tl.float64) - best.to(tl.float64)) / temperature
    if (top_k <= 0) & (top_p >= 1.0):
        threshold = tl.full([], float("-inf"), dtype=tl.float64)
    tl.store(out_ptr + row, tl.maximum(threshold, tl.load(log_min_p_ptr + row)))


def kept_threshold(
    logits: torch.Tensor,
    best: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    log_min_p: torch.Tensor,
) -> torch.Tensor:
    """Launch the kernel of the public op."""
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    num_rows, vocab_size = logits.shape
    out = torch.empty(num_rows, dtype=torch.float64, device=logits.device)
    if num_rows == 0:
        return out
    _kept_threshold_kernel[(num_rows,)](
        out, logits, best.contiguous(), temperature.contiguous(), top_k.contiguous(),
        top_p.contiguous(), log_min_p.contiguous(), logits.stride(0),
        VOCAB_SIZE=vocab_size, TILE=min(_MAX_TILE, triton.next_power_of_2(vocab_size)),
        num_warps=16, enable_fp_fusion=False,
    )  # fmt: skip
    return out
