"""Attention of sequences with few query tokens: the context is split over programs, then merged."""

# triton-lang functions: constants are upper case, and GPU values have no Python types.
# ruff: noqa: N803
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from naiad_kernels.paged_attention import layout
from naiad_kernels.paged_attention.kernel.tile import attend_range, lowest_of

MAX_SPLITS = tl.constexpr(layout.MAX_SPLITS)


@triton.jit
def split_keys(seq_len, MIN_SPLIT: tl.constexpr):
    """Number of keys in a split: it depends on the sequence's own length alone.

    So the rest of the batch does not change the order in which a context is summed.
    """
    return tl.maximum(tl.cdiv(tl.cdiv(seq_len, MAX_SPLITS), MIN_SPLIT), 1) * MIN_SPLIT


@triton.jit(do_not_specialize=["first_seq", "num_splits", "stride_table"])
def short_attention_kernel(
    out_ptr,  # [num_tokens, NUM_HEADS, HEAD_DIM]
    partial_ptr,  # [short tokens, NUM_HEADS, num_splits, HEAD_DIM] float32
    partial_lse_ptr,  # [short tokens, NUM_HEADS, num_splits] float32, base 2
    query_ptr,  # [num_tokens, NUM_HEADS, HEAD_DIM]
    key_cache_ptr,  # [num_blocks, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM]
    value_cache_ptr,
    key_scale_ptr,  # [num_blocks, NUM_KV_HEADS, BLOCK_SIZE] float32, or None: not quantized
    value_scale_ptr,
    block_tables_ptr,  # [num_seqs, max_blocks] int32
    seq_lens_ptr,  # [num_seqs] int32
    query_start_loc_ptr,  # [num_seqs + 1] int32
    first_seq,
    num_splits,
    stride_query_token: tl.int64,
    stride_query_head: tl.int64,
    stride_table: tl.int64,
    scale: tl.float32,
    cap_log2: tl.float32,
    NUM_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    IS_CAPPED: tl.constexpr,
    IS_FIXED: tl.constexpr,
):
    """Grid (num_seqs, num_kv_heads, num_splits).

    A program reads its split's keys once for all query tokens and heads that use them: row r of
    its tile is head r % GROUP_SIZE of token r // GROUP_SIZE. A sequence that fits one split is
    completed here. A split before the window of all query tokens is skipped. With IS_FIXED a token's
    result does not depend on which other tokens the tile holds.
    """
    seq = first_seq + tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    seq_len = tl.load(seq_lens_ptr + seq)
    split_size = split_keys(seq_len, MIN_SPLIT)
    begin = split * split_size
    first_token = tl.load(query_start_loc_ptr + seq)
    query_len = tl.load(query_start_loc_ptr + seq + 1) - first_token
    if (begin >= seq_len) | (query_len == 0):
        return
    end = tl.minimum(begin + split_size, seq_len)
    lowest_key = lowest_of(seq_len, query_len, WINDOW)
    if end <= lowest_key:
        return
    rows = tl.arange(0, TILE_ROWS)
    tokens = rows // GROUP_SIZE
    heads = kv_head * GROUP_SIZE + rows % GROUP_SIZE
    columns = tl.arange(0, TILE_DIM)
    is_row = tokens < query_len
    mask = is_row[:, None] & (columns < HEAD_DIM)[None, :]
    token_ids = (first_token + tokens).to(tl.int64)
    query_rows = token_ids * stride_query_token + heads * stride_query_head
    query = tl.load(query_ptr + query_rows[:, None] + columns[None, :], mask=mask, other=0.0)

    first_position = seq_len - query_len
    begin_of_full = begin
    if WINDOW > 0:
        begin = tl.maximum(begin, lowest_key // TILE_KEYS * TILE_KEYS)
        begin_of_full = tl.maximum(begin, tl.cdiv(tl.maximum(seq_len - WINDOW, 0), TILE_KEYS) * TILE_KEYS)
    visible_to_all = tl.maximum(tl.minimum(end, first_position + 1) - begin, 0)
    if IS_FIXED:
        # The loops round differently: one of them computes every tile, whatever the other rows see of it.
        visible_to_all = 0
        begin_of_full = begin
    accumulated, row_max, row_sum = attend_range(
        query, first_position + tokens,
        key_cache_ptr, value_cache_ptr, key_scale_ptr, value_scale_ptr,
        block_tables_ptr + seq * stride_table, kv_head,
        begin, lowest_key, begin_of_full, begin + visible_to_all // TILE_KEYS * TILE_KEYS, end,
        scale, cap_log2,
        NUM_HEADS // GROUP_SIZE, HEAD_DIM, TILE_DIM, BLOCK_SIZE, TILE_ROWS, TILE_KEYS, WINDOW, IS_CAPPED,
    )  # fmt: skip
    # A split without keys for a token (after its position or before its window) has no weight in the merge.
    result = accumulated / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    out_rows = token_ids * NUM_HEADS + heads
    if split_size >= seq_len:
        out = result.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + out_rows[:, None] * HEAD_DIM + columns[None, :], out, mask=mask)
    else:
        first_short_token = tl.load(query_start_loc_ptr + first_seq)
        partial_rows = (out_rows - first_short_token * NUM_HEADS) * num_splits + split
        tl.store(partial_ptr + partial_rows[:, None] * HEAD_DIM + columns[None, :], result, mask=mask)
        lse = tl.where(row_sum == 0.0, float("-inf"), row_max + tl.log2(row_sum))
        tl.store(partial_lse_ptr + partial_rows, lse, mask=is_row)


@triton.jit(do_not_specialize=["first_seq", "max_query_len", "num_splits"])
def merge_splits_kernel(
    out_ptr,  # [num_tokens, NUM_HEADS, HEAD_DIM]
    partial_ptr,  # [short tokens, NUM_HEADS, num_splits, HEAD_DIM] float32
    partial_lse_ptr,  # [short tokens, NUM_HEADS, num_splits] float32, base 2
    seq_lens_ptr,  # [num_seqs] int32
    query_start_loc_ptr,  # [num_seqs + 1] int32
    first_seq,
    max_query_len,
    num_splits,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_DIM: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    TILE_SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Grid (num_seqs * max_query_len, NUM_HEADS); always sums a row's splits in the same order."""
    seq = first_seq + tl.program_id(0) // max_query_len
    head = tl.program_id(1)
    seq_len = tl.load(seq_lens_ptr + seq)
    split_size = split_keys(seq_len, MIN_SPLIT)
    num_used = tl.cdiv(seq_len, split_size)
    first_token = tl.load(query_start_loc_ptr + seq)
    end_token = tl.load(query_start_loc_ptr + seq + 1)
    token = first_token + tl.program_id(0) % max_query_len
    if (num_used <= 1) | (token >= end_token):
        return
    first_used = lowest_of(seq_len, end_token - first_token, WINDOW) // split_size
    first_short_token = tl.load(query_start_loc_ptr + first_seq)
    row = (token - first_short_token).to(tl.int64) * NUM_HEADS + head
    lanes = tl.arange(0, MAX_SPLITS)
    lse_ptr = partial_lse_ptr + row * num_splits
    has_keys = (lanes >= first_used) & (lanes < num_used)
    lse = tl.load(lse_ptr + lanes, mask=has_keys, other=float("-inf"))
    top = tl.max(lse, axis=0)
    total = tl.sum(tl.exp2(lse - top), axis=0)

    columns = tl.arange(0, TILE_DIM)
    splits = tl.arange(0, TILE_SPLITS)
    merged = tl.zeros([TILE_DIM], dtype=tl.float32)
    for first in tl.range(first_used // TILE_SPLITS * TILE_SPLITS, num_used, TILE_SPLITS):
        is_used = (first + splits >= first_used) & (first + splits < num_used)
        weights = tl.exp2(tl.load(lse_ptr + first + splits, mask=is_used, other=float("-inf")) - top)
        mask = is_used[:, None] & (columns < HEAD_DIM)[None, :]
        rows = (row * num_splits + first + splits) * HEAD_DIM
        partial = tl.load(partial_ptr + rows[:, None] + columns[None, :], mask=mask, other=0.0)
        merged += tl.sum(partial * weights[:, None], axis=0)
    out = (merged / total).to(out_ptr.dtype.element_ty)
    out_row = (token.to(tl.int64) * NUM_HEADS + head) * HEAD_DIM
    tl.store(out_ptr + out_row + columns, out, mask=columns < HEAD_DIM)
