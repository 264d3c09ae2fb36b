"""The product with four-bit weights: codes become floats in registers, groups are scaled in float32."""

# triton-lang functions: constants are upper case, and GPU values have no Python types.
# ruff: noqa: N803, N806
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from naiad_kernels.linear.quantised import weights
from naiad_kernels.linear.quantised.kernel.tile import store_output, store_slab, tile_of_program

_SPAN = tl.constexpr(weights.SPAN)
_WORDS = tl.constexpr(weights.WORDS_PER_SPAN)
_STEP_INPUTS = tl.constexpr(weights.INPUTS_PER_STEP)
_STEPS = tl.constexpr(weights.SPAN // weights.INPUTS_PER_STEP)
# With a code in the last mantissa bits these are the floats 2⁷ + code (bfloat16) and 2¹⁰ + code (float16).
_BFLOAT16_BITS = tl.constexpr(0x4300)
_FLOAT16_BITS = tl.constexpr(0x6400)
# From where a code of e2m1 has its exponent and its mantissa to where these floats have theirs, and by which
# power of two that makes a number too small, because their exponents have other biases.
_BFLOAT16_SHIFT, _BFLOAT16_FACTOR = tl.constexpr(6), tl.constexpr(2.0**126)
_FLOAT16_SHIFT, _FLOAT16_FACTOR = tl.constexpr(9), tl.constexpr(2.0**14)


@triton.jit
def step_weights(words, zeros, STEP: tl.constexpr, TILE_COLUMNS: tl.constexpr, DTYPE: tl.constexpr):
    """Compute code − zero for a step's inputs, `[_STEP_INPUTS, TILE_COLUMNS]` in DTYPE; exact.

    Setting the exponent bits above the codes takes one instruction for two weights. Converting from
    integers takes one for each, at a quarter of the rate.
    """
    BITS: tl.constexpr = _BFLOAT16_BITS if DTYPE.is_bf16() else _FLOAT16_BITS
    codes = (words >> (4 * STEP)) & 0x000F000F
    if not DTYPE.is_fp32():
        codes = codes | (BITS * 0x00010001)
    pairs = tl.join(codes.to(tl.int16), (codes >> 16).to(tl.int16))
    codes = tl.reshape(pairs, TILE_COLUMNS, _STEP_INPUTS)
    if DTYPE.is_fp32():
        shifted = (codes - zeros[:, None]).to(tl.float32)
    else:
        shifted = codes.to(DTYPE, bitcast=True) - (zeros | BITS).to(DTYPE, bitcast=True)[:, None]
    return tl.trans(shifted)


@triton.jit
def step_floats(words, STEP: tl.constexpr, TILE_COLUMNS: tl.constexpr, DTYPE: tl.constexpr):
    """Convert e2m1 to DTYPE for a step's inputs, `[_STEP_INPUTS, TILE_COLUMNS]`; exact.

    The bits of ±0.5 become a subnormal number, which the factor makes a normal one. For float32 they become
    a float16 first, so that it does not matter whether subnormal float32 are flushed.
    """
    IS_BFLOAT16: tl.constexpr = DTYPE.is_bf16()
    HALF: tl.constexpr = tl.bfloat16 if IS_BFLOAT16 else tl.float16
    codes = words >> (4 * STEP)
    magnitudes = (codes & 0x00070007) << (_BFLOAT16_SHIFT if IS_BFLOAT16 else _FLOAT16_SHIFT)
    bits = (codes & 0x00080008) << 12 | magnitudes
    pairs = tl.join(bits.to(tl.int16), (bits >> 16).to(tl.int16))
    floats = tl.reshape(pairs, TILE_COLUMNS, _STEP_INPUTS).to(HALF, bitcast=True).to(DTYPE)
    return tl.trans(floats * (_BFLOAT16_FACTOR if IS_BFLOAT16 else _FLOAT16_FACTOR))


@triton.jit
def powers_of_two(exponents):
    """Compute 2^(exponent − 127) in float32. That of 0 is subnormal."""
    wide = exponents.to(tl.int32)
    return tl.where(wide == 0, 1 << 22, wide << 23).to(tl.float32, bitcast=True)


@triton.jit
def chunk_sums(
    x_ptr,
    words_ptr,
    scales_ptr,
    zeros_ptr,
    rows,
    columns,
    begin,
    end,
    num_rows,
    in_features,
    out_features,
    group_size,
    stride_x,
    stride_span,
    STEPS_PER_GROUP: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    """Sum x · W over the inputs [begin, end): `[TILE_ROWS, TILE_COLUMNS]` float32."""
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    inputs = tl.arange(0, _STEP_INPUTS)
    is_row = (rows < num_rows)[:, None]
    is_column = columns < out_features
    x_rows = x_ptr + rows[:, None] * stride_x
    word_offsets = columns[:, None] * _WORDS + tl.arange(0, _WORDS)[None, :]
    sums = tl.zeros([TILE_ROWS, TILE_COLUMNS], dtype=tl.float32)
    for first in tl.range(begin, end, _SPAN):
        span_ptr = words_ptr + first // _SPAN * stride_span
        words = tl.load(span_ptr + word_offsets, mask=is_column[:, None], other=0)
        for step in tl.static_range(_STEPS):
            step_inputs = first + step * _STEP_INPUTS + inputs
            is_input = (step_inputs < in_features)[None, :]
            x = tl.load(x_rows + step_inputs[None, :], mask=is_row & is_input, other=0.0)
            if step % STEPS_PER_GROUP == 0:
                group = (first + step * _STEP_INPUTS) // group_size * out_features
                scales = tl.load(scales_ptr + group + columns, mask=is_column, other=0)
                if zeros_ptr is not None:
                    zeros = tl.load(zeros_ptr + group + columns, mask=is_column, other=0)
                group_sums = tl.zeros([TILE_ROWS, TILE_COLUMNS], dtype=tl.float32)
            if zeros_ptr is None:
                weight = step_floats(words, step, TILE_COLUMNS, DTYPE)
            else:
                weight = step_weights(words, zeros, step, TILE_COLUMNS, DTYPE)
            group_sums = tl.dot(x, weight, group_sums, input_precision="ieee")
            if step % STEPS_PER_GROUP == STEPS_PER_GROUP - 1:
                factors = powers_of_two(scales) if zeros_ptr is None else scales.to(tl.float32)
                sums += group_sums * factors[None, :]
    return sums


@triton.jit(do_not_specialize=["num_rows"])
def w4a16_kernel(
    out_ptr,  # [num_rows, out_features], unused if IS_SPLIT
    slabs_ptr,  # [num_chunks, num_rows, out_features] float32, written if IS_SPLIT
    x_ptr,  # [num_rows, in_features]
    words_ptr,  # [num_spans, out_features, _WORDS] int32
    scales_ptr,  # [num_groups, out_features]; uint8 exponents if there are no zeros
    zeros_ptr,  # [num_groups, out_features] int16, or None: codes are e2m1
    bias_ptr,  # [out_features] or None
    num_rows,
    in_features,
    out_features,
    chunk_size,
    group_size,
    stride_x: tl.int64,
    stride_span: tl.int64,
    STEPS_PER_GROUP: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    """Grid (tiles, num_chunks) if IS_SPLIT, else (tiles, 1).

    The inputs are summed in chunks, and the chunks are added in order, by one program or by
    `sum_slabs_kernel`; both give the same bits.
    """
    rows, columns = tile_of_program(num_rows, out_features, TILE_ROWS, TILE_COLUMNS)
    if IS_SPLIT:
        chunk = tl.program_id(1)
        begin = chunk * chunk_size
        sums = chunk_sums(
            x_ptr, words_ptr, scales_ptr, zeros_ptr, rows, columns, begin,
            tl.minimum(begin + chunk_size, in_features), num_rows, in_features, out_features,
            group_size, stride_x, stride_span, STEPS_PER_GROUP, TILE_ROWS, TILE_COLUMNS,
        )  # fmt: skip
        store_slab(slabs_ptr, chunk, sums, rows, columns, num_rows, out_features)
    else:
        total = tl.zeros([TILE_ROWS, TILE_COLUMNS], dtype=tl.float32)
        for begin in tl.range(0, in_features, chunk_size):
            total += chunk_sums(
                x_ptr, words_ptr, scales_ptr, zeros_ptr, rows, columns, begin,
                tl.minimum(begin + chunk_size, in_features), num_rows, in_features, out_features,
                group_size, stride_x, stride_span, STEPS_PER_GROUP, TILE_ROWS, TILE_COLUMNS,
            )  # fmt: skip
        store_output(out_ptr, total, rows, columns, num_rows, out_features, None, None, bias_ptr)
