"""The launches of a layer: on its hidden states, on its cache, and in attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from perf.compile_gate.served.shapes import NUM_TOKENS, ServedShape

from naiad_kernels.paged_attention import kernel as attention_kernel
from naiad_kernels.paged_attention.device_step import plan_device_step
from naiad_kernels.rms_norm import kernel as rms_norm_kernel
from naiad_kernels.rotary import kernel as rotary_kernel
from naiad_kernels.rotary_store_kv import kernel as fused_kernel
from naiad_kernels.silu_and_mul import kernel as gated_kernel
from naiad_kernels.store_kv import LayerCache, Slots
from naiad_kernels.store_kv import kernel as store_kv_kernel

_EPS = 1e-5


def attention_launch(
    shape: ServedShape,
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    fixed_split: int = 0,
    window: int = 0,
) -> Callable[[], object]:
    """Attention of a step with these lengths; `fixed_split` and `window` as in `CacheLayout`."""
    layout = replace(shape.layout(), fixed_split=fixed_split, window=window)
    tables = [[0] * layout.blocks_for(length) for length in seq_lens]
    step = plan_device_step(query_lens, seq_lens, tables, layout)
    query = torch.empty(sum(query_lens), shape.num_heads, shape.head_dim, dtype=shape.dtype)
    cache = _cache(shape)
    scale = shape.head_dim**-0.5
    return lambda: attention_kernel.paged_attention(query, cache, step, scale, shape.soft_cap)


def attention(shape: ServedShape) -> Callable[[], object]:
    """Attention of one token, a draft of four, as many as one program computes, and a chunk.

    All contexts are split, and each case is launched with every window of the model's layers.
    """
    group_size = shape.num_heads // shape.num_kv_heads
    steps = [
        attention_launch(shape, [length], [1_000], window=window)
        for window in shape.windows
        for length in (1, 5, 64 // group_size, 500)
    ]
    return lambda: [launch() for launch in steps]


def small_ops(shape: ServedShape) -> Callable[[], object]:
    """Norms, rotary embedding, and every activation."""
    hidden = torch.empty(NUM_TOKENS, shape.hidden_size, dtype=shape.dtype)
    norm = torch.empty(shape.hidden_size, dtype=shape.norm_dtype)
    rotated = _projected(shape)[:, : shape.num_heads + shape.num_kv_heads]
    head_norms = torch.empty(rotated.shape[1:], dtype=shape.norm_dtype)
    angles = torch.empty(NUM_TOKENS, 1, shape.head_dim, dtype=shape.dtype)
    gate_up = torch.empty(NUM_TOKENS, 2 * shape.intermediate_size, dtype=shape.dtype)

    def launch() -> None:
        rms_norm_kernel.rms_norm(hidden, norm, _EPS)
        rms_norm_kernel.add_rms_norm(hidden, hidden, norm, _EPS)
        rms_norm_kernel.rms_norm(rotated, head_norms, _EPS)
        rotary_kernel.rotary(rotated, angles, angles)
        for activation in gated_kernel.ACTIVATIONS:
            gated_kernel.activate_and_mul(gate_up, activation)

    return launch


def cache_ops(shape: ServedShape) -> Callable[[], object]:
    """Writes to the cache, also fused with the rotary embedding, with and without norms of the heads."""
    heads = _projected(shape)
    num_rotated = shape.num_heads + shape.num_kv_heads
    key, value = heads[:, shape.num_heads : num_rotated], heads[:, num_rotated:]
    head_norms = torch.empty(num_rotated, shape.head_dim, dtype=shape.norm_dtype)
    angles = torch.empty(NUM_TOKENS, 1, shape.head_dim, dtype=shape.dtype)
    slot = torch.zeros(NUM_TOKENS, dtype=torch.int64)
    slots, cache = Slots(slot, slot), _cache(shape)

    def launch() -> None:
        store_kv_kernel.store_kv(key, value, cache, slots)
        for norms in (None, head_norms):
            fused_kernel.rotary_store_kv(heads, (angles, angles), (norms, _EPS), cache, slots)

    return launch


def _projected(shape: ServedShape) -> torch.Tensor:
    """Queries, keys and values of a step."""
    num_projected = shape.num_heads + 2 * shape.num_kv_heads
    return torch.empty(NUM_TOKENS, num_projected, shape.head_dim, dtype=shape.dtype)


def _cache(shape: ServedShape) -> LayerCache:
    rows = (2, shape.num_kv_heads, shape.block_size)
    part = torch.empty(*rows, shape.head_dim, dtype=shape.cache_dtype or shape.dtype)
    scale = torch.empty(rows) if shape.cache_dtype else None
    return LayerCache(part, part, scale, scale)
