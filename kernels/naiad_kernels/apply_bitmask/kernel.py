"""`apply_bitmask` on a GPU: a program for each tile of each masked row."""

# triton-lang functions: constants are upper case, and GPU values have no Python types.
# ruff: noqa: N803
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

_TILE = 1024


@triton.jit
def _apply_bitmask_kernel(
    logits_ptr,  # [num_rows, VOCAB_SIZE] float32, overwritten
    rows_ptr,  # [num_masks] int64
    allowed_ptr,  # [num_masks, NUM_WORDS] int32
    stride_row: tl.int64,
    VOCAB_SIZE: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid (num_masks, num_tiles)."""
    place = tl.program_id(0).to(tl.int64)
    token_ids = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_token = token_ids < VOCAB_SIZE
    words = tl.load(allowed_ptr + place * NUM_WORDS + token_ids // 32, mask=is_token, other=-1)
    is_excluded = ((words >> (token_ids % 32)) & 1) == 0
    excluded = tl.full((TILE,), float("-inf"), tl.float32)
    # Logits of allowed tokens are neither read nor written.
    row = tl.load(rows_ptr + place)
    tl.store(logits_ptr + row * stride_row + token_ids, excluded, mask=is_token & is_excluded)


def apply_bitmask(logits: torch.Tensor, rows: torch.Tensor, allowed: torch.Tensor) -> None:
    """Launch the kernel of the public op; `rows` [num_masks] int64 and `allowed` are on the device."""
    assert logits.stride(1) == 1, logits.stride()
    num_masks, num_words = allowed.shape
    vocab_size = logits.shape[1]
    _apply_bitmask_kernel[(num_masks, triton.cdiv(vocab_size, _TILE))](
        logits, rows, allowed, logits.stride(0),
        VOCAB_SIZE=vocab_size, NUM_WORDS=num_words, TILE=_TILE, num_warps=4,
    )  # fmt: skip
