"""Attention of sequences with many query tokens: a program computes a tile of a sequence's tokens."""

# triton-lang functions: constants are upper case, and GPU values have no Python types.
# ruff: noqa: N803, N806
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from naiad_kernels.paged_attention.kernel.tile import attend_range, lowest_of


@triton.jit
def sequence_of_tile(query_start_loc_ptr, first_seq, num_seqs, tile, TILE_TOKENS: tl.constexpr):
    """The sequence to which a tile belongs, and the tile's index within the sequence.

    The tiles of sequence i start at ⌊tokens before it / TILE_TOKENS⌋ + i. This leaves enough tiles for
    each sequence and needs no sum over rounded lengths. The search finds the last sequence whose tiles
    start at or before this one.
    """
    base = tl.load(query_start_loc_ptr + first_seq)
    low = 0
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        start = (tl.load(query_start_loc_ptr + first_seq + middle) - base) // TILE_TOKENS + middle
        if start <= tile:
            low = middle
        else:
            high = middle
    start = (tl.load(query_start_loc_ptr + first_seq + low) - base) // TILE_TOKENS + low
    return first_seq + low, tile - start


@triton.jit(do_not_specialize=["first_seq", "num_seqs", "stride_table"])
def long_attention_kernel(
    out_ptr,  # [num_tokens, NUM_HEADS, HEAD_DIM]
    query_ptr,  # [num_tokens, NUM_HEADS, HEAD_DIM]
    key_cache_ptr,  # [num_blocks, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM]
    value_cache_ptr,
    key_scale_ptr,  # [num_blocks, NUM_KV_HEADS, BLOCK_SIZE] float32, or None: not quantized
    value_scale_ptr,
    block_tables_ptr,  # [num_seqs, max_blocks] int32
    seq_lens_ptr,  # [num_seqs] int32
    query_start_loc_ptr,  # [num_seqs + 1] int32
    first_seq,
    num_seqs,
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
    WINDOW: tl.constexpr,
    IS_CAPPED: tl.constexpr,
):
    """Grid (at least all tiles of all sequences, num_kv_heads).

    A tile has ⌊TILE_ROWS / GROUP_SIZE⌋ tokens with the GROUP_SIZE heads that share a KV head; remaining
    rows are masked.
    """
    # Later tiles of a sequence see more keys. They start first, so that the last programs are short.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    TILE_TOKENS: tl.constexpr = TILE_ROWS // GROUP_SIZE
    seq, seq_tile = sequence_of_tile(query_start_loc_ptr, first_seq, num_seqs, tile, TILE_TOKENS)
    first_token = tl.load(query_start_loc_ptr + seq)
    query_len = tl.load(query_start_loc_ptr + seq + 1) - first_token
    first_of_tile = seq_tile * TILE_TOKENS
    if first_of_tile >= query_len:
        return
    rows = tl.arange(0, TILE_ROWS)
    tokens = first_of_tile + rows // GROUP_SIZE
    heads = kv_head * GROUP_SIZE + rows % GROUP_SIZE
    columns = tl.arange(0, TILE_DIM)
    is_row = (rows < TILE_TOKENS * GROUP_SIZE) & (tokens < query_len)
    mask = is_row[:, None] & (columns < HEAD_DIM)[None, :]
    token_ids = (first_token + tokens).to(tl.int64)
    query_rows = token_ids * stride_query_token + heads * stride_query_head
    query = tl.load(query_ptr + query_rows[:, None] + columns[None, :], mask=mask, other=0.0)

    position = tl.load(seq_lens_ptr + seq) - query_len
    end = position + tl.minimum(first_of_tile + TILE_TOKENS, query_len)
    visible_to_all = position + first_of_tile + 1
    lowest_key = lowest_of(visible_to_all, 1, WINDOW)
    begin = 0
    begin_of_full = 0
    if WINDOW > 0:
        begin = lowest_key // TILE_KEYS * TILE_KEYS
        begin_of_full = tl.maximum(begin, tl.cdiv(tl.maximum(end - WINDOW, 0), TILE_KEYS) * TILE_KEYS)
    accumulated, _, row_sum = attend_range(
        query, position + tokens,
        key_cache_ptr, value_cache_ptr, key_scale_ptr, value_scale_ptr,
        block_tables_ptr + seq * stride_table, kv_head,
        begin, lowest_key, begin_of_full, visible_to_all // TILE_KEYS * TILE_KEYS, end, scale, cap_log2,
        NUM_HEADS // GROUP_SIZE, HEAD_DIM, TILE_DIM, BLOCK_SIZE, TILE_ROWS, TILE_KEYS, WINDOW, IS_CAPPED,
    )  # fmt: skip
    out = (accumulated / row_sum[:, None]).to(out_ptr.dtype.element_ty)
    out_rows = (token_ids * NUM_HEADS + heads) * HEAD_DIM
    tl.store(out_ptr + out_rows[:, None] + columns[None, :], out, mask=mask)
