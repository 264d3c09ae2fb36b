"""Code shared by the kernels of the quantised linears: a program's tile, and writing its result."""

# triton-lang functions: constants are upper case, and GPU values have no Python types.
# ruff: noqa: N803
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

_GROUP_TILES = tl.constexpr(8)


@triton.jit
def tile_of_program(num_rows, out_features, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr):
    """The rows (int64) and columns of this program's tile of the output.

    Columns advance after every _GROUP_TILES tiles of rows, so that programs that run at the same time
    share a few tiles of x and of the weight, each of which is read from memory once.
    """
    num_row_tiles = tl.cdiv(num_rows, TILE_ROWS)
    group_programs = _GROUP_TILES * tl.cdiv(out_features, TILE_COLUMNS)
    first_row_tile = tl.program_id(0) // group_programs * _GROUP_TILES
    group_tiles = tl.minimum(num_row_tiles - first_row_tile, _GROUP_TILES)
    within = tl.program_id(0) % group_programs
    rows = (first_row_tile + within % group_tiles) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    return rows.to(tl.int64), within // group_tiles * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)


@triton.jit
def store_slab(slabs_ptr, chunk, sums, rows, columns, num_rows, out_features):
    """Store a chunk's sums as float32 in `[num_chunks, num_rows, out_features]`."""
    offsets = (chunk * num_rows + rows)[:, None] * out_features + columns[None, :]
    tl.store(slabs_ptr + offsets, sums, mask=(rows < num_rows)[:, None] & (columns < out_features)[None, :])


@triton.jit
def store_output(
    out_ptr,  # [num_rows, out_features]
    sums,  # [rows, columns] float32
    rows,
    columns,
    num_rows,
    out_features,
    column_scales_ptr,  # [out_features] or None
    row_scales_ptr,  # [num_rows] or None
    bias_ptr,  # [out_features] or None
):
    """Scale, add the bias, and round once."""
    is_row = rows < num_rows
    is_column = columns < out_features
    if column_scales_ptr is not None:
        column_scales = tl.load(column_scales_ptr + columns, mask=is_column, other=0.0)
        sums = sums * column_scales.to(tl.float32)[None, :]
    if row_scales_ptr is not None:
        sums = sums * tl.load(row_scales_ptr + rows, mask=is_row, other=0.0)[:, None]
    if bias_ptr is not None:
        sums = sums + tl.load(bias_ptr + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    offsets = rows[:, None] * out_features + columns[None, :]
    mask = is_row[:, None] & is_column[None, :]
    tl.store(out_ptr + offsets, sums.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def sum_slabs_kernel(
    out_ptr,  # [num_rows, out_features]
    slabs_ptr,  # [NUM_CHUNKS, num_rows, out_features] float32
    column_scales_ptr,  # [out_features] or None
    row_scales_ptr,  # [num_rows] or None
    bias_ptr,  # [out_features] or None
    num_rows,
    out_features,
    NUM_CHUNKS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    """Grid (num_rows, tiles of columns); chunks are added in order, as in an unsplit program."""
    rows = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    columns = tl.program_id(1) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    mask = (columns < out_features)[None, :]
    total = tl.zeros([1, TILE_COLUMNS], dtype=tl.float32)
    for chunk in tl.static_range(NUM_CHUNKS):
        offsets = (chunk * num_rows + rows)[:, None] * out_features + columns[None, :]
        total += tl.load(slabs_ptr + offsets, mask=mask, other=0.0)
    store_output(
        out_ptr, total, rows, columns, num_rows, out_features, column_scales_ptr, row_scales_ptr, bias_ptr
    )
