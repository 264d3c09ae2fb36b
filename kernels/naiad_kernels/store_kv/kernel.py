"""`store_kv` on a GPU: a program stores several heads of one token, keys and values."""

# triton-lang functions: constants are upper case, and GPU values have no Python types.
# ruff: noqa: N803
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

from naiad_kernels.store_kv.encode import encode, scale_of
from naiad_kernels.store_kv.layer_cache import LayerCache, Slots

_TILE_ELEMENTS = 1024


@triton.jit
def _store_rows(
    cache_ptr,  # [rows, HEAD_DIM]
    scale_ptr,  # [rows] float32, or None: not quantized
    x,  # [TILE_HEADS, TILE_DIM]
    rows,  # [TILE_HEADS, 1] int64
    columns,  # [1, TILE_DIM]
    mask,
    is_row,  # [TILE_HEADS, 1]
    HEAD_DIM: tl.constexpr,
):
    """Store a head's vector in each row of the cache."""
    if scale_ptr is not None:
        x = x.to(tl.float32)
        largest = tl.max(tl.abs(x), axis=1, keep_dims=True)
        scale = scale_of(largest, tl.sum(x * 0.0, axis=1, keep_dims=True), cache_ptr.dtype.element_ty)
        tl.store(scale_ptr + rows, scale, mask=is_row)
        x = encode(x, scale, cache_ptr.dtype.element_ty)
    tl.store(cache_ptr + rows * HEAD_DIM + columns, x, mask=mask)


@triton.jit
def _store_kv_kernel(
    key_cache_ptr,  # [num_blocks, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM]
    value_cache_ptr,
    key_scale_ptr,  # [num_blocks, NUM_KV_HEADS, BLOCK_SIZE] float32, or None: not quantized
    value_scale_ptr,
    key_ptr,  # [num_tokens, NUM_KV_HEADS, HEAD_DIM]
    value_ptr,
    blocks_ptr,  # [num_tokens] int64, negative: the token is padding
    offsets_ptr,  # [num_tokens] int64
    stride_key_token: tl.int64,
    stride_key_head: tl.int64,
    stride_value_token: tl.int64,
    stride_value_head: tl.int64,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    TILE_DIM: tl.constexpr,
):
    """Grid (num_tokens, NUM_KV_HEADS / TILE_HEADS)."""
    token = tl.program_id(0).to(tl.int64)
    block = tl.load(blocks_ptr + token)
    if block < 0:
        return
    offset = tl.load(offsets_ptr + token)
    heads = (tl.program_id(1) * TILE_HEADS + tl.arange(0, TILE_HEADS)).to(tl.int64)[:, None]
    columns = tl.arange(0, TILE_DIM)[None, :]
    is_head = heads < NUM_KV_HEADS
    mask = is_head & (columns < HEAD_DIM)
    key_rows = key_ptr + token * stride_key_token + heads * stride_key_head
    value_rows = value_ptr + token * stride_value_token + heads * stride_value_head
    key = tl.load(key_rows + columns, mask=mask, other=0.0)
    value = tl.load(value_rows + columns, mask=mask, other=0.0)
    rows = (block * NUM_KV_HEADS + heads) * BLOCK_SIZE + offset
    _store_rows(key_cache_ptr, key_scale_ptr, key, rows, columns, mask, is_head, HEAD_DIM)
    _store_rows(value_cache_ptr, value_scale_ptr, value, rows, columns, mask, is_head, HEAD_DIM)


def store_kv(key: torch.Tensor, value: torch.Tensor, cache: LayerCache, slots: Slots) -> None:
    """Launch the kernel of the public op."""
    key = key if key.stride(2) == 1 else key.contiguous()
    value = value if value.stride(2) == 1 else value.contiguous()
    num_tokens, num_kv_heads, head_dim = key.shape
    if num_tokens == 0:
        return
    tile_dim = triton.next_power_of_2(head_dim)
    tile_heads = min(triton.next_power_of_2(num_kv_heads), max(1, _TILE_ELEMENTS // tile_dim))
    _store_kv_kernel[(num_tokens, triton.cdiv(num_kv_heads, tile_heads))](
        cache.key,
        cache.value,
        cache.key_scale,
        cache.value_scale,
        key,
        value,
        slots.blocks,
        slots.offsets,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        NUM_KV_HEADS=num_kv_heads,
        BLOCK_SIZE=cache.key.shape[2],
        HEAD_DIM=head_dim,
        TILE_HEADS=tile_heads,
        TILE_DIM=tile_dim,
        num_warps=4,
        enable_fp_fusion=True,
    )
