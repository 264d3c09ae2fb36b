"""The product with one-byte weights: int8 with floating-point or int8 activations, or FP8 for both."""

# triton-lang functions: constants are upper case, and GPU values have no Python types.
# ruff: noqa: N803, N806
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from naiad_kernels.linear.quantised.kernel.tile import store_output, store_slab, tile_of_program


@triton.jit
def chunk_sums(
    x_ptr,
    values_ptr,
    column_scales_ptr,
    row_scales_ptr,
    rows,
    columns,
    begin,
    end,
    num_rows,
    out_features,
    in_features,
    group_size,
    stride_x,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    TILE_INPUTS: tl.constexpr,
):
    """Sum x · valuesᵀ over the inputs [begin, end): `[TILE_ROWS, TILE_COLUMNS]` float32.

    If there are groups, each tile of inputs lies in one, and is scaled before it is added.
    """
    is_row = rows < num_rows
    is_column = columns < out_features
    x_rows = x_ptr + rows[:, None] * stride_x
    value_columns = values_ptr + columns.to(tl.int64)[None, :] * in_features
    IS_INT: tl.constexpr = x_ptr.dtype.element_ty.is_int8()
    # A chunk's sum of products of int8 is exact: it would take 2¹⁷ inputs to overflow.
    sums = tl.zeros([TILE_ROWS, TILE_COLUMNS], dtype=tl.int32 if IS_INT else tl.float32)
    for first in tl.range(begin, end, TILE_INPUTS):
        inputs = first + tl.arange(0, TILE_INPUTS)
        is_input = inputs < end
        x = tl.load(x_rows + inputs[None, :], mask=is_row[:, None] & is_input[None, :], other=0.0)
        value_mask = is_input[:, None] & is_column[None, :]
        values = tl.load(value_columns + inputs[:, None], mask=value_mask, other=0.0)
        # Hopper adds FP8 products with few bits, so the sum is moved to a float32 register after each tile.
        if IS_INT:
            sums = tl.dot(x, values, sums, out_dtype=tl.int32)
        elif group_size is None:
            sums = tl.dot(
                x, values.to(x.dtype), sums, input_precision="ieee", max_num_imprecise_acc=TILE_INPUTS
            )
        else:
            # This sum starts at zero, so it has few bits for one tile only.
            products = tl.dot(x, values, input_precision="ieee")
            column_offsets = first // group_size * out_features + columns
            column_scales = tl.load(column_scales_ptr + column_offsets, mask=is_column, other=0.0)
            row_offsets = first // TILE_INPUTS * num_rows + rows
            row_scales = tl.load(row_scales_ptr + row_offsets, mask=is_row, other=0.0)
            sums += products * column_scales.to(tl.float32)[None, :] * row_scales[:, None]
    return sums.to(tl.float32)


@triton.jit(do_not_specialize=["num_rows"])
def byte_kernel(
    out_ptr,  # [num_rows, out_features], unused if IS_SPLIT
    slabs_ptr,  # [num_chunks, num_rows, out_features] float32, written if IS_SPLIT
    x_ptr,  # [num_rows, in_features], floating, int8 or FP8
    values_ptr,  # [out_features, in_features] int8 or FP8
    column_scales_ptr,  # [out_features], or [num_groups, out_features] if there are groups
    row_scales_ptr,  # [num_rows] float32 or None, or [num_spans, num_rows] if there are groups
    bias_ptr,  # [out_features] or None
    num_rows,
    in_features,
    out_features,
    chunk_size,
    group_size,  # a multiple of TILE_INPUTS, or None: there are no groups
    stride_x: tl.int64,
    IS_SPLIT: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    TILE_INPUTS: tl.constexpr,
):
    """Grid and order of summation as for `w4a16_kernel`; scales are applied to sums of groups or of all."""
    rows, columns = tile_of_program(num_rows, out_features, TILE_ROWS, TILE_COLUMNS)
    if IS_SPLIT:
        chunk = tl.program_id(1)
        begin = chunk * chunk_size
        sums = chunk_sums(
            x_ptr, values_ptr, column_scales_ptr, row_scales_ptr, rows, columns, begin,
            tl.minimum(begin + chunk_size, in_features), num_rows, out_features, in_features,
            group_size, stride_x, TILE_ROWS, TILE_COLUMNS, TILE_INPUTS,
        )  # fmt: skip
        store_slab(slabs_ptr, chunk, sums, rows, columns, num_rows, out_features)
    else:
        total = tl.zeros([TILE_ROWS, TILE_COLUMNS], dtype=tl.float32)
        for begin in tl.range(0, in_features, chunk_size):
            total += chunk_sums(
                x_ptr, values_ptr, column_scales_ptr, row_scales_ptr, rows, columns, begin,
                tl.minimum(begin + chunk_size, in_features), num_rows, out_features, in_features,
                group_size, stride_x, TILE_ROWS, TILE_COLUMNS, TILE_INPUTS,
            )  # fmt: skip
        if group_size is None:
            store_output(
                out_ptr, total, rows, columns, num_rows, out_features,
                column_scales_ptr, row_scales_ptr, bias_ptr,
            )  # fmt: skip
        else:
            store_output(out_ptr, total, rows, columns, num_rows, out_features, None, None, bias_ptr)
