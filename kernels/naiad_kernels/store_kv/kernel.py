"""`store_kv` on a GPU: a program stores several heads of one token, keys and values."""

# triton-lang functions: constants are upper case, and what a GPU computes has no Python type.
# ruff: noqa: N803
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

_TILE_ELEMENTS = 1024


@triton.jit
def _store_kv_kernel(
    key_cache_ptr,  # [num_blocks, NUM_KV_HEADS, block_size, HEAD_DIM]
    value_cache_ptr,
    key_ptr,  # [num_tokens, NUM_KV_HEADS, HEAD_DIM]
    value_ptr,
    blocks_ptr,  # [num_tokens] int64, negative: the token is padding
    offsets_ptr,  # [num_tokens] int64
    stride_key_token: tl.int64,
    stride_key_head: tl.int64,
    stride_value_token: tl.int64,
    stride_value_head: tl.int64,
    stride_block: tl.int64,
    stride_cache_head: tl.int64,
    NUM_KV_HEADS: tl.constexpr,
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
    mask = (heads < NUM_KV_HEADS) & (columns < HEAD_DIM)
    key = tl.load(key_ptr + token * stride_key_token + heads * stride_key_head + columns, mask=mask)
    value = tl.load(value_ptr + token * stride_value_token + heads * stride_value_head + columns, mask=mask)
    slot = block * stride_block + heads * stride_cache_head + offset * HEAD_DIM + columns
    tl.store(key_cache_ptr + slot, key, mask=mask)
    tl.store(value_cache_ptr + slot, value, mask=mask)


def store_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    blocks: torch.Tensor,
    offsets: torch.Tensor,
) -> None:
    """See the public op."""
    assert key_cache.is_contiguous()
    assert value_cache.is_contiguous()
    key = key if key.stride(2) == 1 else key.contiguous()
    value = value if value.stride(2) == 1 else value.contiguous()
    num_tokens, num_kv_heads, head_dim = key.shape
    if num_tokens == 0:
        return
    tile_dim = triton.next_power_of_2(head_dim)
    tile_heads = min(triton.next_power_of_2(num_kv_heads), max(1, _TILE_ELEMENTS // tile_dim))
    _store_kv_kernel[(num_tokens, triton.cdiv(num_kv_heads, tile_heads))](
        key_cache,
        value_cache,
        key,
        value,
        blocks,
        offsets,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        key_cache.stride(0),
        key_cache.stride(1),
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        TILE_HEADS=tile_heads,
        TILE_DIM=tile_dim,
        num_warps=4,
        enable_fp_fusion=True,
    )
