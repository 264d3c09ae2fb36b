"""`rotary_store_kv` on a GPU: a program computes several heads of one token, of any kind."""

# triton-lang functions: constants are upper case, and GPU values have no Python types.
# ruff: noqa: N803, N806
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

from naiad_kernels.store_kv import LayerCache, Slots
from naiad_kernels.store_kv.encode import encode, scale_of

_TILE_ELEMENTS = 1024


@triton.jit
def _store_halves(
    cache_ptr,  # [rows, 2 * HALF]
    scale_ptr,  # [rows] float32, or None: not quantized
    first,  # [TILE_HEADS, TILE_HALF]
    second,
    rows,  # [TILE_HEADS, 1] int64
    columns,  # [1, TILE_HALF]
    is_row,  # [TILE_HEADS, 1]
    HALF: tl.constexpr,
):
    """Store a head's two halves in each row of the cache."""
    if scale_ptr is not None:
        CODE: tl.constexpr = cache_ptr.dtype.element_ty
        first, second = first.to(tl.float32), second.to(tl.float32)
        largest = tl.max(tl.maximum(tl.abs(first), tl.abs(second)), axis=1, keep_dims=True)
        scale = scale_of(largest, tl.sum(first * 0.0 + second * 0.0, axis=1, keep_dims=True), CODE)
        tl.store(scale_ptr + rows, scale, mask=is_row)
        first, second = encode(first, scale, CODE), encode(second, scale, CODE)
    mask = is_row & (columns < HALF)
    row_ptr = cache_ptr + rows * 2 * HALF + columns
    tl.store(row_ptr, first, mask=mask)
    tl.store(row_ptr + HALF, second, mask=mask)


@triton.jit
def _rotary_store_kv_kernel(
    query_ptr,  # [num_tokens, NUM_HEADS, 2 * HALF], written
    key_cache_ptr,  # [num_blocks, NUM_KV_HEADS, BLOCK_SIZE, 2 * HALF]
    value_cache_ptr,
    key_scale_ptr,  # [num_blocks, NUM_KV_HEADS, BLOCK_SIZE] float32, or None: not quantized
    value_scale_ptr,
    heads_ptr,  # [num_tokens, NUM_HEADS + 2 * NUM_KV_HEADS, 2 * HALF]
    weight_ptr,  # [NUM_HEADS + NUM_KV_HEADS, 2 * HALF], read if HAS_NORM
    cos_ptr,  # [num_tokens, 2 * HALF]
    signed_sin_ptr,
    blocks_ptr,  # [num_tokens] int64, negative: the token is padding
    offsets_ptr,  # [num_tokens] int64
    stride_token: tl.int64,
    stride_head: tl.int64,
    eps: tl.float32,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    HAS_NORM: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    TILE_HALF: tl.constexpr,
):
    """Grid (num_tokens, heads / TILE_HEADS); the halves of a head are two tiles."""
    NUM_ROTATED: tl.constexpr = NUM_HEADS + NUM_KV_HEADS
    dtype = query_ptr.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    heads = (tl.program_id(1) * TILE_HEADS + tl.arange(0, TILE_HEADS)).to(tl.int64)[:, None]
    columns = tl.arange(0, TILE_HALF)[None, :]
    is_column = columns < HALF
    mask = (heads < NUM_ROTATED + NUM_KV_HEADS) & is_column
    is_rotated = (heads < NUM_ROTATED) & is_column
    in_ptr = heads_ptr + token * stride_token + heads * stride_head + columns
    first_in = tl.load(in_ptr, mask=mask, other=0.0)
    second_in = tl.load(in_ptr + HALF, mask=mask, other=0.0)

    first, second = first_in.to(tl.float32), second_in.to(tl.float32)
    if HAS_NORM:
        squares = tl.sum(first * first, axis=1, keep_dims=True) + tl.sum(
            second * second, axis=1, keep_dims=True
        )
        scale = tl.rsqrt(squares / (2 * HALF) + eps)
        row_ptr = weight_ptr + heads * 2 * HALF + columns
        first_weight = tl.load(row_ptr, mask=is_rotated, other=0.0).to(tl.float32)
        second_weight = tl.load(row_ptr + HALF, mask=is_rotated, other=0.0).to(tl.float32)
        first, second = first * scale, second * scale
        # Round where the three separate ops round.
        if weight_ptr.dtype.element_ty == dtype:
            first, second = first.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32)
        first = (first * first_weight).to(dtype).to(tl.float32)
        second = (second * second_weight).to(dtype).to(tl.float32)
    angle_row = token * 2 * HALF
    cos = tl.load(cos_ptr + angle_row + columns, mask=is_column, other=0.0).to(tl.float32)
    sin = tl.load(signed_sin_ptr + angle_row + HALF + columns, mask=is_column, other=0.0).to(tl.float32)
    first_out = (first * cos - second * sin).to(dtype)
    second_out = (second * cos + first * sin).to(dtype)

    is_query = (heads < NUM_HEADS) & is_column
    out_ptr = query_ptr + (token * NUM_HEADS + heads) * 2 * HALF + columns
    tl.store(out_ptr, first_out, mask=is_query)
    tl.store(out_ptr + HALF, second_out, mask=is_query)
    block = tl.load(blocks_ptr + token)
    if block < 0:
        return
    slot = block * NUM_KV_HEADS * BLOCK_SIZE + tl.load(offsets_ptr + token)
    key_rows = slot + (heads - NUM_HEADS) * BLOCK_SIZE
    is_key = (heads >= NUM_HEADS) & (heads < NUM_ROTATED)
    _store_halves(key_cache_ptr, key_scale_ptr, first_out, second_out, key_rows, columns, is_key, HALF)
    value_rows = slot + (heads - NUM_ROTATED) * BLOCK_SIZE
    is_value = (heads >= NUM_ROTATED) & (heads < NUM_ROTATED + NUM_KV_HEADS)
    _store_halves(value_cache_ptr, value_scale_ptr, first_in, second_in, value_rows, columns, is_value, HALF)


def rotary_store_kv(
    heads: torch.Tensor,
    angles: tuple[torch.Tensor, torch.Tensor],
    norm: tuple[torch.Tensor | None, float],
    cache: LayerCache,
    slots: Slots,
) -> torch.Tensor:
    """Launch the kernel of the public op; `norm` is the weight and eps."""
    heads = heads if heads.stride(2) == 1 else heads.contiguous()
    num_tokens, num_all, head_dim = heads.shape
    _, num_kv_heads, block_size, _ = cache.key.shape
    num_heads = num_all - 2 * num_kv_heads
    query = torch.empty((num_tokens, num_heads, head_dim), dtype=heads.dtype, device=heads.device)
    if num_tokens == 0:
        return query
    weight, eps = norm
    tile_half = triton.next_power_of_2(head_dim // 2)
    tile_heads = min(triton.next_power_of_2(num_all), max(1, _TILE_ELEMENTS // tile_half))
    _rotary_store_kv_kernel[(num_tokens, triton.cdiv(num_all, tile_heads))](
        query, cache.key, cache.value, cache.key_scale, cache.value_scale,
        heads, None if weight is None else weight.contiguous(),
        angles[0].contiguous(), angles[1].contiguous(), slots.blocks, slots.offsets,
        heads.stride(0), heads.stride(1), eps,
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, BLOCK_SIZE=block_size, HALF=head_dim // 2,
        HAS_NORM=weight is not None, TILE_HEADS=tile_heads, TILE_HALF=tile_half,
        num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    return query
