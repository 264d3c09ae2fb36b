"""`rejection_sampling` on a GPU: rows are decided a tile of the vocabulary at a time, then walked."""

# triton-lang functions: constants are upper case, and what a GPU computes has no Python type.
# ruff: noqa: N803
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

from naiad_kernels.gumbel_argmax.kernel import gumbel_noise, uniform_noise
from naiad_kernels.rejection_sampling.rows import ACCEPT_NOISE_ID, RESIDUAL_FLOOR, Drafts, TargetRows

_TILE = 1024
_ACCEPT_NOISE_ID = tl.constexpr(ACCEPT_NOISE_ID)
_RESIDUAL_FLOOR = tl.constexpr(RESIDUAL_FLOOR)


@triton.jit
def _possible_scores(logits, best, temperature, threshold):
    """Scaled logits, float64; −inf for what the target can not emit."""
    scaled = (logits.to(tl.float64) - best.to(tl.float64)) / temperature
    return tl.where(scaled >= threshold, scaled, float("-inf"))


@triton.jit
def _row_mass(tile_masses_ptr, row, num_tiles, TILE_TILES: tl.constexpr):
    """Sum of a row's tiles, in an order of its own."""
    tiles = tl.arange(0, TILE_TILES)
    masses = tl.load(tile_masses_ptr + row * num_tiles + tiles, mask=tiles < num_tiles, other=0.0)
    return tl.sum(masses, axis=0)


@triton.jit(do_not_specialize=["num_tiles"])
def _target_mass_kernel(
    tile_masses_ptr,  # [num_rows, num_tiles] float64
    logits_ptr,  # [num_rows, VOCAB_SIZE] float32
    best_ptr,  # [num_rows] float32
    temperature_ptr,  # [num_rows] float64
    threshold_ptr,  # [num_rows] float64
    draft_ids_ptr,  # [num_rows] int64
    num_tiles,
    stride_row: tl.int64,
    VOCAB_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid (num_rows, num_tiles); rows whose drafts need no probabilities are left out."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    if (tl.load(draft_ids_ptr + row) < 0) | (temperature == 0.0):
        return
    token_ids = tile * TILE + tl.arange(0, TILE)
    is_token = token_ids < VOCAB_SIZE
    logits = tl.load(logits_ptr + row * stride_row + token_ids, mask=is_token, other=float("-inf"))
    scores = _possible_scores(logits, tl.load(best_ptr + row), temperature, tl.load(threshold_ptr + row))
    masses = tl.where(is_token, tl.exp(scores), 0.0)
    tl.store(tile_masses_ptr + row * num_tiles + tile, tl.sum(masses, axis=0))


@triton.jit(do_not_specialize=["num_tiles"])
def _row_tokens_kernel(
    tile_scores_ptr,  # [num_rows, num_tiles] float64
    tile_ids_ptr,  # [num_rows, num_tiles] int64
    tile_masses_ptr,  # [num_rows, num_tiles] float64, read if HAS_PROBS
    logits_ptr,  # [num_rows, VOCAB_SIZE] float32
    best_ptr,  # [num_rows] float32
    temperature_ptr,  # [num_rows] float64
    threshold_ptr,  # [num_rows] float64
    keys_ptr,  # [num_rows] int64
    draft_ids_ptr,  # [num_rows] int64
    draft_probs_ptr,  # [num_rows, VOCAB_SIZE] float32, read if HAS_PROBS
    num_tiles,
    stride_row: tl.int64,
    stride_draft_row: tl.int64,
    VOCAB_SIZE: tl.constexpr,
    HAS_PROBS: tl.constexpr,
    TILE: tl.constexpr,
    TILE_TILES: tl.constexpr,
):
    """Grid (num_rows, num_tiles): the best token of each tile, were the row's draft rejected."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    token_ids = tile * TILE + tl.arange(0, TILE)
    is_token = token_ids < VOCAB_SIZE
    logits = tl.load(logits_ptr + row * stride_row + token_ids, mask=is_token, other=float("-inf"))
    temperature = tl.load(temperature_ptr + row)
    scores = logits.to(tl.float64)
    if temperature != 0.0:
        best, threshold = tl.load(best_ptr + row), tl.load(threshold_ptr + row)
        scores = _possible_scores(logits, best, temperature, threshold)
        if HAS_PROBS:
            draft_id = tl.load(draft_ids_ptr + row)
            if draft_id >= 0:
                target = tl.exp(scores) / _row_mass(tile_masses_ptr, row, num_tiles, TILE_TILES)
                draft_row_ptr = draft_probs_ptr + row * stride_draft_row
                draft = tl.load(draft_row_ptr + token_ids, mask=is_token, other=0.0).to(tl.float64)
                scores = tl.log(tl.maximum(target - draft, target * _RESIDUAL_FLOOR))
        scores += gumbel_noise(tl.load(keys_ptr + row), token_ids)
        scores = tl.where(is_token, scores, float("-inf"))
    top, index = tl.max(scores, axis=0, return_indices=True)
    tl.store(tile_scores_ptr + row * num_tiles + tile, top)
    tl.store(tile_ids_ptr + row * num_tiles + tile, (tile * TILE + index).to(tl.int64))


@triton.jit(do_not_specialize=["num_tiles", "num_slots"])
def _walk_kernel(
    num_accepted_ptr,  # [num_seqs] int64
    out_ptr,  # [num_seqs, num_slots] int64
    tile_scores_ptr,  # [num_rows, num_tiles] float64
    tile_ids_ptr,  # [num_rows, num_tiles] int64
    tile_masses_ptr,  # [num_rows, num_tiles] float64, read if HAS_PROBS
    logits_ptr,  # [num_rows, vocab_size] float32
    best_ptr,  # [num_rows] float32
    temperature_ptr,  # [num_rows] float64
    threshold_ptr,  # [num_rows] float64
    keys_ptr,  # [num_rows] int64
    draft_ids_ptr,  # [num_rows] int64
    draft_probs_ptr,  # [num_rows, vocab_size] float32, read if HAS_PROBS
    row_start_loc_ptr,  # [num_seqs + 1] int32
    num_tiles,
    num_slots,
    stride_row: tl.int64,
    stride_draft_row: tl.int64,
    HAS_PROBS: tl.constexpr,
    TILE_TILES: tl.constexpr,
    TILE_SLOTS: tl.constexpr,
):
    """Grid (num_seqs,): a sequence's rows in order, until one does not accept its draft."""
    seq = tl.program_id(0).to(tl.int64)
    first = tl.load(row_start_loc_ptr + seq).to(tl.int64)
    end = tl.minimum(tl.load(row_start_loc_ptr + seq + 1).to(tl.int64), first + num_slots)
    tiles = tl.arange(0, TILE_TILES)
    slots = tl.arange(0, TILE_SLOTS)
    emitted = tl.full([TILE_SLOTS], -1, dtype=tl.int64)
    num_accepted = tl.full([], 0, dtype=tl.int64)
    row = first
    while row < end:
        scores_ptr = tile_scores_ptr + row * num_tiles
        scores = tl.load(scores_ptr + tiles, mask=tiles < num_tiles, other=float("-inf"))
        token = tl.load(tile_ids_ptr + row * num_tiles + tl.argmax(scores, axis=0))
        draft = tl.load(draft_ids_ptr + row)
        is_accepted = draft == token
        if HAS_PROBS:
            temperature = tl.load(temperature_ptr + row)
            if (draft >= 0) & (temperature != 0.0):
                logit = tl.load(logits_ptr + row * stride_row + draft)
                best, threshold = tl.load(best_ptr + row), tl.load(threshold_ptr + row)
                score = _possible_scores(logit, best, temperature, threshold)
                target = tl.exp(score) / _row_mass(tile_masses_ptr, row, num_tiles, TILE_TILES)
                law = tl.load(draft_probs_ptr + row * stride_draft_row + draft).to(tl.float64)
                uniform = uniform_noise(tl.load(keys_ptr + row), tl.full([], _ACCEPT_NOISE_ID, tl.int64))
                is_accepted = uniform * law < target
        emitted = tl.where(slots == row - first, tl.where(is_accepted, draft, token), emitted)
        num_accepted += is_accepted.to(tl.int64)
        row = tl.where(is_accepted, row + 1, end)
    tl.store(num_accepted_ptr + seq, num_accepted)
    tl.store(out_ptr + seq * num_slots + slots, emitted, mask=slots < num_slots)


def rejection_sampling(
    target: TargetRows, drafts: Drafts, row_start_loc: torch.Tensor, max_drafts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the public op."""
    device, num_seqs, num_slots = target.logits.device, len(row_start_loc) - 1, max_drafts + 1
    num_accepted = torch.empty(num_seqs, dtype=torch.int64, device=device)
    out = torch.empty((num_seqs, num_slots), dtype=torch.int64, device=device)
    if num_seqs == 0:
        return num_accepted, out
    per_row = (target.best, target.temperature, target.threshold, target.keys, drafts.token_ids)
    rows = (_dense_rows(target.logits), *(each.contiguous() for each in per_row))
    probs = None if drafts.probs is None else _dense_rows(drafts.probs)
    tiles = _decide_tiles(rows, probs)
    num_tiles = tiles[0].shape[1]
    _walk_kernel[(num_seqs,)](
        num_accepted, out, *tiles, *rows, probs, row_start_loc.contiguous(), num_tiles, num_slots,
        *_strides(rows, probs), HAS_PROBS=probs is not None, TILE_TILES=triton.next_power_of_2(num_tiles),
        TILE_SLOTS=triton.next_power_of_2(num_slots), num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return num_accepted, out


def _decide_tiles(
    rows: tuple[torch.Tensor, ...], probs: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Best score and id of each row's tiles, and their mass for drafts with laws, `[num_rows, num_tiles]`.

    `rows` are logits, best, temperature, threshold, keys and draft ids.
    """
    num_rows, vocab_size = rows[0].shape
    grid = (num_rows, triton.cdiv(vocab_size, _TILE))
    scores = torch.empty(grid, dtype=torch.float64, device=rows[0].device)
    ids = torch.empty(grid, dtype=torch.int64, device=scores.device)
    masses = torch.empty(grid if probs is not None else (0, 0), dtype=torch.float64, device=scores.device)
    if num_rows and probs is not None:
        _target_mass_kernel[grid](
            masses, *rows[:4], rows[5], grid[1], rows[0].stride(0),
            VOCAB_SIZE=vocab_size, TILE=_TILE, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    if num_rows:
        _row_tokens_kernel[grid](
            scores, ids, masses, *rows, probs, grid[1], *_strides(rows, probs),
            VOCAB_SIZE=vocab_size, HAS_PROBS=probs is not None, TILE=_TILE,
            TILE_TILES=triton.next_power_of_2(grid[1]), num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return scores, ids, masses


def _strides(rows: tuple[torch.Tensor, ...], probs: torch.Tensor | None) -> tuple[int, int]:
    return rows[0].stride(0), 0 if probs is None else probs.stride(0)


def _dense_rows(values: torch.Tensor) -> torch.Tensor:
    return values if values.stride(1) == 1 else values.contiguous()
