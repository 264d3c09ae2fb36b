"""What the attention kernels share: one tile of keys, and the online softmax over tiles."""

# triton-lang functions: constants are upper case, and what a GPU computes has no Python type.
# ruff: noqa: N803
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from naiad_kernels.paged_attention import layout

MAX_TREE_ROWS = tl.constexpr(layout.MAX_TREE_ROWS)
# Below every score, yet finite: a row that has seen no key yet must not compute inf − inf.
NO_SCORE = tl.constexpr(-1.0e38)
# A weight times a value's scale would be too small for float16: times this, it is at most the
# value's largest magnitude.
SCALE_UP = tl.constexpr(64.0)


@triton.jit
def cache_rows(
    table_ptr,  # [blocks of the sequence] int32
    kv_head,
    first_key,
    num_keys,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_KEYS: tl.constexpr,
):
    """Where the keys of a tile lie: rows of the cache, `[TILE_KEYS]` int64."""
    lanes = tl.arange(0, TILE_KEYS)
    if BLOCK_SIZE % TILE_KEYS == 0:
        # The whole tile lies in one block: one scalar id, and the rows follow each other.
        block = tl.load(table_ptr + first_key // BLOCK_SIZE).to(tl.int64)
        rows = (block * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + first_key % BLOCK_SIZE + lanes
    else:
        positions = first_key + lanes
        is_key = positions < num_keys
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
    first_draft,  # the key that bit 0 of a tree mask stands for
    tree_masks,  # [TILE_ROWS] int32, or None
    keys_ptr,  # [rows of the cache, HEAD_DIM]
    values_ptr,
    key_scales_ptr,  # [rows of the cache] float32, or None
    value_scales_ptr,
    table_ptr,
    kv_head,
    first_key,
    num_keys,
    scale_log2,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    IS_FULL: tl.constexpr,
):
    """Add TILE_KEYS keys to the running softmax; IS_FULL: every row attends to all of them.

    What lies after `num_keys` is not read: it may hold anything, NaN included.
    """
    rows = cache_rows(table_ptr, kv_head, first_key, num_keys, NUM_KV_HEADS, BLOCK_SIZE, TILE_KEYS)
    columns = tl.arange(0, TILE_DIM)
    offsets = rows[:, None] * HEAD_DIM + columns[None, :]
    positions = first_key + tl.arange(0, TILE_KEYS)
    if IS_FULL and HEAD_DIM == TILE_DIM:
        keys = tl.load(keys_ptr + offsets)
        values = tl.load(values_ptr + offsets)
    else:
        mask = (positions < num_keys)[:, None] & (columns < HEAD_DIM)[None, :]
        keys = tl.load(keys_ptr + offsets, mask=mask, other=0.0)
        values = tl.load(values_ptr + offsets, mask=mask, other=0.0)
    scores = tl.dot(query, tl.trans(keys.to(query.dtype)), input_precision="ieee") * scale_log2
    if key_scales_ptr is not None:
        scores *= tl.load(key_scales_ptr + rows, mask=positions < num_keys, other=0.0)[None, :]
    if not IS_FULL:
        is_visible = positions[None, :] <= last_visible[:, None]
        if tree_masks is not None:
            # The context is before bit 0, and a row of a longer sequence has every bit.
            bits = tl.minimum(tl.maximum(positions - first_draft, 0), 31)
            is_ancestor = (tree_masks[:, None] >> bits[None, :]) & 1
            is_visible &= (positions < first_draft)[None, :] | (is_ancestor != 0)
        scores = tl.where(is_visible, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, axis=1))
    weights = tl.exp2(scores - new_max[:, None])
    rescale = tl.exp2(row_max - new_max)
    row_sum = row_sum * rescale + tl.sum(weights, axis=1)
    accumulated = accumulated * rescale[:, None]
    if value_scales_ptr is not None:
        scales = tl.load(value_scales_ptr + rows, mask=positions < num_keys, other=0.0)
        weights *= (scales * SCALE_UP)[None, :]
    accumulated = tl.dot(weights.to(query.dtype), values.to(query.dtype), accumulated, input_precision="ieee")
    return accumulated, new_max, row_sum


@triton.jit
def attend_range(
    query,  # [TILE_ROWS, TILE_DIM]
    last_visible,  # [TILE_ROWS] int32
    first_draft,
    tree_masks,  # [TILE_ROWS] int32, or None
    keys_ptr,
    values_ptr,
    key_scales_ptr,
    value_scales_ptr,
    table_ptr,
    kv_head,
    begin,
    end_of_full,
    end,
    scale_log2,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
):
    """Softmax over the keys `begin` … `end`; all rows see those before `end_of_full`.

    `begin` and `end_of_full` lie on borders of tiles.

    Returns:
        the weighted sum of values, not divided yet, `[TILE_ROWS, TILE_DIM]`, and the rows' maximum
        and sum.
    """
    accumulated = tl.zeros([TILE_ROWS, TILE_DIM], dtype=tl.float32)
    row_max = tl.full([TILE_ROWS], NO_SCORE, dtype=tl.float32)
    row_sum = tl.zeros([TILE_ROWS], dtype=tl.float32)
    # Two loops, so that no key of a full tile is compared or masked.
    for first_key in tl.range(begin, end_of_full, TILE_KEYS):
        accumulated, row_max, row_sum = attend_tile(
            accumulated, row_max, row_sum, query, last_visible, first_draft, tree_masks,
            keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, table_ptr, kv_head,
            first_key, end, scale_log2, NUM_KV_HEADS, HEAD_DIM, TILE_DIM, BLOCK_SIZE, TILE_KEYS, True,
        )  # fmt: skip
    for first_key in tl.range(end_of_full, end, TILE_KEYS):
        accumulated, row_max, row_sum = attend_tile(
            accumulated, row_max, row_sum, query, last_visible, first_draft, tree_masks,
            keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, table_ptr, kv_head,
            first_key, end, scale_log2, NUM_KV_HEADS, HEAD_DIM, TILE_DIM, BLOCK_SIZE, TILE_KEYS, False,
        )  # fmt: skip
    if value_scales_ptr is not None:
        accumulated *= 1.0 / SCALE_UP
    return accumulated, row_max, row_sum
