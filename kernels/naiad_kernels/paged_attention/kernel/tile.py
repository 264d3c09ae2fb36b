"""Code shared by the attention kernels: one tile of keys, and the online softmax over tiles."""

# triton-lang functions: constants are upper case, and GPU values have no Python types.
# ruff: noqa: N803
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

# Below every score, but finite: a row that has not seen any key must not compute inf − inf.
NO_SCORE = tl.constexpr(-1.0e38)
# A weight times a value's scale may be too small for float16. Multiplied by this it is still at most the
# value's largest magnitude.
SCALE_UP = tl.constexpr(64.0)


@triton.jit
def lowest_of(seq_len, query_len, WINDOW: tl.constexpr):
    """The first key that any of a sequence's last `query_len` tokens attends to; 0 without a window."""
    lowest_key = 0
    if WINDOW > 0:
        lowest_key = tl.maximum(seq_len - query_len + 1 - WINDOW, 0)
    return lowest_key


@triton.jit
def cache_rows(
    table_ptr,  # [blocks of the sequence] int32
    kv_head,
    first_key,
    lowest_key,
    num_keys,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_KEYS: tl.constexpr,
):
    """The cache rows of a tile's keys, `[TILE_KEYS]` int64.

    Rows of keys before `lowest_key` and from `num_keys` on are arbitrary: their blocks are not looked
    up unless they share a block with the keys in between.
    """
    lanes = tl.arange(0, TILE_KEYS)
    if BLOCK_SIZE % TILE_KEYS == 0:
        # The whole tile is in one block: its id is one scalar, and the rows are contiguous.
        block = tl.load(table_ptr + first_key // BLOCK_SIZE).to(tl.int64)
        rows = (block * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + first_key % BLOCK_SIZE + lanes
    else:
        positions = first_key + lanes
        is_key = (positions >= lowest_key) & (positions < num_keys)
        blocks = tl.load(table_ptr + positions // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
        rows = (blocks * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + positions % BLOCK_SIZE
    return rows


@triton.jit
def attend_tile(
    accumulated,  # [TILE_ROWS, TILE_DIM] float32
    row_max,  # [TILE_ROWS] float32, of scores in base 2
    row_sum,  # [TILE_ROWS] float32
    query,  # [TILE_ROWS, TILE_DIM]
    last_visible,  # [TILE_ROWS] int32, the last key a row attends to
    keys_ptr,  # [rows of the cache, HEAD_DIM]
    values_ptr,
    key_scales_ptr,  # [rows of the cache] float32, or None
    value_scales_ptr,
    table_ptr,
    kv_head,
    first_key,
    lowest_key,
    num_keys,
    scale,
    cap_log2,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    IS_CAPPED: tl.constexpr,
    IS_FULL: tl.constexpr,
):
    """Add TILE_KEYS keys to the running softmax; IS_FULL: every row attends to all of them.

    Keys before `lowest_key` or from `num_keys` on are not read: they may be anything, including NaN.
    """
    rows = cache_rows(
        table_ptr, kv_head, first_key, lowest_key, num_keys, NUM_KV_HEADS, BLOCK_SIZE, TILE_KEYS
    )
    columns = tl.arange(0, TILE_DIM)
    offsets = rows[:, None] * HEAD_DIM + columns[None, :]
    positions = first_key + tl.arange(0, TILE_KEYS)
    is_key = positions < num_keys
    if WINDOW > 0:
        is_key &= positions >= lowest_key
    if IS_FULL and HEAD_DIM == TILE_DIM:
        keys = tl.load(keys_ptr + offsets)
        values = tl.load(values_ptr + offsets)
    else:
        mask = is_key[:, None] & (columns < HEAD_DIM)[None, :]
        keys = tl.load(keys_ptr + offsets, mask=mask, other=0.0)
        values = tl.load(values_ptr + offsets, mask=mask, other=0.0)
    scores = tl.dot(query, tl.trans(keys.to(query.dtype)), input_precision="ieee") * scale
    if key_scales_ptr is not None:
        scores *= tl.load(key_scales_ptr + rows, mask=is_key, other=0.0)[None, :]
    if IS_CAPPED:
        # tanh z = 2 · sigmoid(2 z) − 1.
        scores = cap_log2 * (2.0 * tl.sigmoid(2.0 * scores) - 1.0)
    if not IS_FULL:
        is_visible = positions[None, :] <= last_visible[:, None]
        if WINDOW > 0:
            is_visible &= positions[None, :] > last_visible[:, None] - WINDOW
        scores = tl.where(is_visible, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, axis=1))
    weights = tl.exp2(scores - new_max[:, None])
    rescale = tl.exp2(row_max - new_max)
    row_sum = row_sum * rescale + tl.sum(weights, axis=1)
    accumulated = accumulated * rescale[:, None]
    if value_scales_ptr is not None:
        scales = tl.load(value_scales_ptr + rows, mask=is_key, other=0.0)
        weights *= (scales * SCALE_UP)[None, :]
    accumulated = tl.dot(weights.to(query.dtype), values.to(query.dtype), accumulated, input_precision="ieee")
    return accumulated, new_max, row_sum


@triton.jit
def attend_range(
    query,  # [TILE_ROWS, TILE_DIM]
    last_visible,  # [TILE_ROWS] int32
    keys_ptr,
    values_ptr,
    key_scales_ptr,
    value_scales_ptr,
    table_ptr,
    kv_head,
    begin,
    lowest_key,
    begin_of_full,
    end_of_full,
    end,
    scale,
    cap_log2,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    IS_CAPPED: tl.constexpr,
):
    """Attend to the keys [begin, end); no row sees keys before `lowest_key`.

    All rows see the keys [begin_of_full, end_of_full); without a window `begin` is `begin_of_full`.
    These three are multiples of TILE_KEYS.

    Returns:
        The weighted sum of values, not divided yet, `[TILE_ROWS, TILE_DIM]`, and the rows' maximum
        and sum.
    """
    accumulated = tl.zeros([TILE_ROWS, TILE_DIM], dtype=tl.float32)
    row_max = tl.full([TILE_ROWS], NO_SCORE, dtype=tl.float32)
    row_sum = tl.zeros([TILE_ROWS], dtype=tl.float32)
    # Separate loops, so that no key of a full tile is compared or masked.
    if WINDOW > 0:
        for first_key in tl.range(begin, tl.minimum(begin_of_full, end), TILE_KEYS):
            accumulated, row_max, row_sum = attend_tile(
                accumulated, row_max, row_sum, query, last_visible,
                keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, table_ptr, kv_head,
                first_key, lowest_key, end, scale, cap_log2,
                NUM_KV_HEADS, HEAD_DIM, TILE_DIM, BLOCK_SIZE, TILE_KEYS, WINDOW, IS_CAPPED, False,
            )  # fmt: skip
        end_of_full = tl.maximum(begin_of_full, end_of_full)
    for first_key in tl.range(begin_of_full, end_of_full, TILE_KEYS):
        accumulated, row_max, row_sum = attend_tile(
            accumulated, row_max, row_sum, query, last_visible,
            keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, table_ptr, kv_head,
            first_key, lowest_key, end, scale, cap_log2,
            NUM_KV_HEADS, HEAD_DIM, TILE_DIM, BLOCK_SIZE, TILE_KEYS, WINDOW, IS_CAPPED, True,
        )  # fmt: skip
    for first_key in tl.range(end_of_full, end, TILE_KEYS):
        accumulated, row_max, row_sum = attend_tile(
            accumulated, row_max, row_sum, query, last_visible,
            keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, table_ptr, kv_head,
            first_key, lowest_key, end, scale, cap_log2,
            NUM_KV_HEADS, HEAD_DIM, TILE_DIM, BLOCK_SIZE, TILE_KEYS, WINDOW, IS_CAPPED, False,
        )  # fmt: skip
    if value_scales_ptr is not None:
        accumulated *= 1.0 / SCALE_UP
    return accumulated, row_max, row_sum
