"""`lora_shrink` and `lora_expand` on a GPU: a program computes up to 16 tokens of one adapter."""

# triton-lang functions: constants are upper case, and GPU values have no Python types.
# ruff: noqa: N803
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

from naiad_kernels.lora.plan import TILE_TOKENS, LoraPlan

# By bytes per element; float32 has no matrix instructions of full precision and needs more registers.
_TILE_IN, _TILE_OUT = {2: 128, 4: 32}, {2: 128, 4: 64}
# A program of `lora_shrink` sums a part of the columns, which depends on in_dim alone, as does the order
# of summation.
_MIN_PART, _MAX_PARTS = 512, 8
# With this many tiles of tokens or more, a program of `lora_expand` computes several tiles of `up`, so
# that partial sums are read less often.
_MANY_TOKEN_TILES, _UP_TILES = 16, 8


@triton.jit
def _tokens_of_tile(token_ids_ptr, begin, end, TILE_TOKENS: tl.constexpr):
    """The tokens of a tile, and which of its lanes have one."""
    lanes = begin + tl.arange(0, TILE_TOKENS)
    return tl.load(token_ids_ptr + lanes, mask=lanes < end, other=0), lanes < end


@triton.jit(do_not_specialize=["num_tokens"])
def _lora_shrink_kernel(
    shrunk_ptr,  # [num_parts, num_slices, num_tokens, RANK] float32
    x_ptr,  # [num_tokens, IN_DIM]
    down_ptr,  # [num_adapters, num_slices, RANK, IN_DIM]
    token_ids_ptr,  # [num_tokens] int64
    tile_adapters_ptr,  # [num_tiles] int64
    tile_begins_ptr,  # [num_tiles] int64
    tile_ends_ptr,  # [num_tiles] int64
    num_tokens,
    stride_x: tl.int64,
    IN_DIM: tl.constexpr,
    RANK: tl.constexpr,
    PART: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    TILE_RANK: tl.constexpr,
    TILE_IN: tl.constexpr,
):
    """Grid (num_tiles, num_slices, num_parts); a part is PART columns of x."""
    tile, slice_id, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    adapter = tl.load(tile_adapters_ptr + tile)
    if adapter < 0:
        return
    begin, end = tl.load(tile_begins_ptr + tile), tl.load(tile_ends_ptr + tile)
    tokens, is_token = _tokens_of_tile(token_ids_ptr, begin, end, TILE_TOKENS)
    ranks = tl.arange(0, TILE_RANK)
    columns = tl.arange(0, TILE_IN)
    x_rows = x_ptr + tokens[:, None] * stride_x
    down_rows = down_ptr + ((adapter * tl.num_programs(1) + slice_id) * RANK + ranks[None, :]) * IN_DIM
    total = tl.zeros([TILE_TOKENS, TILE_RANK], dtype=tl.float32)
    for first in tl.range(part * PART, tl.minimum(part * PART + PART, IN_DIM), TILE_IN):
        is_column = first + columns < IN_DIM
        x_mask = is_token[:, None] & is_column[None, :]
        x = tl.load(x_rows + (first + columns)[None, :], mask=x_mask, other=0.0)
        down_mask = (ranks < RANK)[None, :] & is_column[:, None]
        down = tl.load(down_rows + (first + columns)[:, None], mask=down_mask, other=0.0)
        total = tl.dot(x, down, total, input_precision="ieee")
    rows = ((part * tl.num_programs(1) + slice_id) * num_tokens + tokens[:, None]) * RANK
    mask = is_token[:, None] & (ranks < RANK)[None, :]
    tl.store(shrunk_ptr + rows + ranks[None, :], total, mask=mask)


@triton.jit(do_not_specialize=["num_tokens", "num_up_tiles"])
def _lora_expand_kernel(
    out_ptr,  # [num_tokens, OUT_DIM]
    shrunk_ptr,  # [NUM_PARTS, num_slices, num_tokens, RANK] float32
    up_ptr,  # [num_adapters, OUT_DIM, RANK]
    token_ids_ptr,  # [num_tokens] int64
    tile_adapters_ptr,  # [num_tiles] int64
    tile_begins_ptr,  # [num_tiles] int64
    tile_ends_ptr,  # [num_tiles] int64
    num_tokens,
    num_up_tiles,
    stride_out: tl.int64,
    SLICE_SIZES: tl.constexpr,
    OUT_DIM: tl.constexpr,
    RANK: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    TILE_RANK: tl.constexpr,
    TILE_OUT: tl.constexpr,
):
    """Grid (num_tiles, num_slices, runs of num_up_tiles tiles of the longest slice)."""
    tile, slice_id = tl.program_id(0), tl.program_id(1)
    adapter = tl.load(tile_adapters_ptr + tile)
    slice_begin = 0
    slice_end = SLICE_SIZES[0]
    for before in tl.static_range(len(SLICE_SIZES) - 1):
        if slice_id > before:
            slice_begin = slice_end
            slice_end += SLICE_SIZES[before + 1]
    run_begin = slice_begin + tl.program_id(2) * num_up_tiles * TILE_OUT
    run_end = tl.minimum(slice_end, run_begin + num_up_tiles * TILE_OUT)
    if (adapter < 0) | (run_begin >= run_end):
        return
    begin, end = tl.load(tile_begins_ptr + tile), tl.load(tile_ends_ptr + tile)
    tokens, is_token = _tokens_of_tile(token_ids_ptr, begin, end, TILE_TOKENS)
    ranks = tl.arange(0, TILE_RANK)
    mask = is_token[:, None] & (ranks < RANK)[None, :]
    rows = (slice_id * num_tokens + tokens[:, None]) * RANK + ranks[None, :]
    stride_part = tl.num_programs(1).to(tl.int64) * num_tokens * RANK
    shrunk = tl.zeros([TILE_TOKENS, TILE_RANK], dtype=tl.float32)
    for part in tl.range(0, NUM_PARTS):
        shrunk += tl.load(shrunk_ptr + part * stride_part + rows, mask=mask, other=0.0)
    narrow = shrunk.to(up_ptr.dtype.element_ty)
    for first in tl.range(run_begin, run_end, TILE_OUT):
        columns = first + tl.arange(0, TILE_OUT)
        is_column = columns < run_end
        up_rows = (adapter * OUT_DIM + columns[None, :]) * RANK
        up_mask = (ranks < RANK)[:, None] & is_column[None, :]
        up = tl.load(up_ptr + up_rows + ranks[:, None], mask=up_mask, other=0.0)
        added = tl.dot(narrow, up, input_precision="ieee")
        out_mask = is_token[:, None] & is_column[None, :]
        out_tile = out_ptr + tokens[:, None] * stride_out + columns[None, :]
        out = tl.load(out_tile, mask=out_mask, other=0.0).to(tl.float32) + added
        tl.store(out_tile, out.to(out_ptr.dtype.element_ty), mask=out_mask)


def lora_shrink(x: torch.Tensor, down: torch.Tensor, plan: LoraPlan) -> torch.Tensor:
    """Launch the kernel of the public op."""
    x = x if x.stride(1) == 1 else x.contiguous()
    num_tokens, in_dim = x.shape
    num_slices, rank = down.shape[1:3]
    tile_in = _TILE_IN[x.element_size()]
    part = max(_MIN_PART, triton.cdiv(triton.cdiv(in_dim, _MAX_PARTS), tile_in) * tile_in)
    num_parts = triton.cdiv(in_dim, part)
    shrunk = torch.empty((num_parts, num_slices, num_tokens, rank), dtype=torch.float32, device=x.device)
    if num_tokens == 0:
        return shrunk
    _lora_shrink_kernel[(len(plan.tile_adapters), num_slices, num_parts)](
        shrunk, x, down, plan.token_ids, plan.tile_adapters, plan.tile_begins, plan.tile_ends,
        num_tokens, x.stride(0), IN_DIM=in_dim, RANK=rank, PART=part, TILE_TOKENS=TILE_TOKENS,
        TILE_RANK=_tile_rank(rank), TILE_IN=tile_in, num_warps=4, num_stages=3, enable_fp_fusion=True,
    )  # fmt: skip
    return shrunk


def lora_expand(
    out: torch.Tensor, shrunk: torch.Tensor, up: torch.Tensor, slice_sizes: tuple[int, ...], plan: LoraPlan
) -> None:
    """Launch the kernel of the public op."""
    num_parts, num_slices, num_tokens, rank = shrunk.shape
    if num_tokens == 0:
        return
    num_tiles = len(plan.tile_adapters)
    num_up_tiles = _UP_TILES if num_tiles >= _MANY_TOKEN_TILES else 1
    tile_out = _TILE_OUT[out.element_size()]
    num_runs = triton.cdiv(max(slice_sizes), num_up_tiles * tile_out)
    _lora_expand_kernel[(num_tiles, num_slices, num_runs)](
        out, shrunk, up, plan.token_ids, plan.tile_adapters, plan.tile_begins, plan.tile_ends,
        num_tokens, num_up_tiles, out.stride(0), SLICE_SIZES=slice_sizes, OUT_DIM=out.shape[1],
        RANK=rank, NUM_PARTS=num_parts, TILE_TOKENS=TILE_TOKENS, TILE_RANK=_tile_rank(rank),
        TILE_OUT=tile_out, num_warps=4, num_stages=2, enable_fp_fusion=True,
    )  # fmt: skip


def _tile_rank(rank: int) -> int:
    """The rank padded to a power of two, at least 16, the minimum of a matrix instruction."""
    return max(16, int(triton.next_power_of_2(rank)))
