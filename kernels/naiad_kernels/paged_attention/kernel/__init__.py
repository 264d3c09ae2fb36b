"""`paged_attention` on a GPU: one or two launches for each run of a step's sequences."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton

from naiad_kernels.paged_attention.device_step import DeviceStep, Run
from naiad_kernels.paged_attention.kernel.long import long_attention_kernel
from naiad_kernels.paged_attention.kernel.short import merge_splits_kernel, short_attention_kernel
from naiad_kernels.paged_attention.kernel.tile_table import long_tile, short_tile
from naiad_kernels.paged_attention.layout import MAX_SPLITS
from naiad_kernels.store_kv import LayerCache

_TILE_SPLITS = 16
_MIN_TILE_DIM = 16


@dataclass(frozen=True, slots=True)
class _Scores:
    """Factors of the scores for a softmax to base 2, for which a GPU has an instruction.

    Attributes:
        scale: factor of a query's product with a key; with a soft cap, before the hyperbolic tangent.
        cap_log2: with a soft cap, factor of the tangent; else 0.
    """

    scale: float
    cap_log2: float

    @classmethod
    def of(cls, scale: float, soft_cap: float) -> _Scores:
        if soft_cap:
            return cls(scale / soft_cap, soft_cap * math.log2(math.e))
        return cls(scale * math.log2(math.e), 0.0)


def paged_attention(
    query: torch.Tensor, cache: LayerCache, step: DeviceStep, scale: float, soft_cap: float
) -> torch.Tensor:
    """Compute the public op without waiting for the GPU.

    Rows of tokens that belong to no sequence of the step remain uninitialised.
    """
    query = query if query.stride(2) == 1 else query.contiguous()
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    scores = _Scores.of(scale, soft_cap)
    for run in step.runs:
        if run.is_short:
            _attend_short(out, query, cache, step, run, scores)
        else:
            _attend_long(out, query, cache, step, run, scores)
    return out.flatten(1)


def num_splits(max_seq_len: int, min_split: int) -> int:
    """The most splits of a sequence with at most this many tokens."""
    return min(-(-max_seq_len // min_split), MAX_SPLITS)


def _attend_short(
    out: torch.Tensor,
    query: torch.Tensor,
    cache: LayerCache,
    step: DeviceStep,
    run: Run,
    scores: _Scores,
) -> None:
    num_heads, head_dim = query.shape[1:]
    _, num_kv_heads, block_size, _ = cache.key.shape
    group_size = num_heads // num_kv_heads
    tile_dim = _tile_dim(head_dim)
    num_rows = run.max_query_len * group_size
    tile = short_tile(query.element_size(), tile_dim, num_rows, cache.is_quantized)
    splits = num_splits(run.max_seq_len, run.min_split)
    num_partials = run.num_tokens * num_heads * splits if splits > 1 else 0
    partial = torch.empty(num_partials * head_dim, dtype=torch.float32, device=query.device)
    partial_lse = torch.empty(num_partials, dtype=torch.float32, device=query.device)
    short_attention_kernel[(run.num_seqs, num_kv_heads, splits)](
        out, partial, partial_lse, query, cache.key, cache.value, cache.key_scale, cache.value_scale,
        step.block_tables, step.seq_lens, step.query_start_loc, run.first_seq, splits,
        query.stride(0), query.stride(1), step.block_tables.stride(0), scores.scale, scores.cap_log2,
        NUM_HEADS=num_heads, GROUP_SIZE=group_size, HEAD_DIM=head_dim, TILE_DIM=tile_dim,
        BLOCK_SIZE=block_size, TILE_ROWS=tile.rows, TILE_KEYS=tile.keys, MIN_SPLIT=run.min_split,
        WINDOW=step.window, IS_CAPPED=scores.cap_log2 > 0, IS_FIXED=run.is_fixed,
        num_warps=tile.num_warps, num_stages=tile.num_stages, enable_fp_fusion=True,
        maxnreg=tile.max_registers,
    )  # fmt: skip
    if splits > 1:
        merge_splits_kernel[(run.num_seqs * run.max_query_len, num_heads)](
            out, partial, partial_lse, step.seq_lens, step.query_start_loc,
            run.first_seq, run.max_query_len, splits,
            NUM_HEADS=num_heads, HEAD_DIM=head_dim, TILE_DIM=tile_dim, MIN_SPLIT=run.min_split,
            TILE_SPLITS=_TILE_SPLITS, WINDOW=step.window, num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip


def _attend_long(
    out: torch.Tensor,
    query: torch.Tensor,
    cache: LayerCache,
    step: DeviceStep,
    run: Run,
    scores: _Scores,
) -> None:
    num_heads, head_dim = query.shape[1:]
    _, num_kv_heads, block_size, _ = cache.key.shape
    group_size = num_heads // num_kv_heads
    tile_dim = _tile_dim(head_dim)
    tile = long_tile(query.element_size(), tile_dim, group_size, cache.is_quantized, _capability())
    # An upper bound: the sequences' lengths are known on the device only.
    num_tiles = run.num_tokens // (tile.rows // group_size) + run.num_seqs
    long_attention_kernel[(num_tiles, num_kv_heads)](
        out, query, cache.key, cache.value, cache.key_scale, cache.value_scale,
        step.block_tables, step.seq_lens, step.query_start_loc, run.first_seq, run.num_seqs,
        query.stride(0), query.stride(1), step.block_tables.stride(0), scores.scale, scores.cap_log2,
        NUM_HEADS=num_heads, GROUP_SIZE=group_size, HEAD_DIM=head_dim, TILE_DIM=tile_dim,
        BLOCK_SIZE=block_size, TILE_ROWS=tile.rows, TILE_KEYS=tile.keys,
        WINDOW=step.window, IS_CAPPED=scores.cap_log2 > 0,
        num_warps=tile.num_warps, num_stages=tile.num_stages, enable_fp_fusion=True,
        maxnreg=tile.max_registers,
    )  # fmt: skip


def _capability() -> int:
    """The compute capability that kernels are compiled for: 90 for sm_90; 0 in the interpreter."""
    if triton.knobs.runtime.interpret:
        return 0
    return int(triton.runtime.driver.active.get_current_target().arch)


def _tile_dim(head_dim: int) -> int:
    return max(_MIN_TILE_DIM, int(triton.next_power_of_2(head_dim)))
