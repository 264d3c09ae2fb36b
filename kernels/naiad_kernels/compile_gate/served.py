"""The shapes that kernels are compiled for before a GPU is at hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from naiad_kernels.gumbel_argmax import kernel as gumbel_kernel
from naiad_kernels.kept_threshold import kernel as threshold_kernel
from naiad_kernels.paged_attention import kernel as attention_kernel
from naiad_kernels.paged_attention.device_step import plan_device_step
from naiad_kernels.paged_attention.layout import CacheLayout
from naiad_kernels.rms_norm import kernel as rms_norm_kernel
from naiad_kernels.rotary import kernel as rotary_kernel
from naiad_kernels.rotary_store_kv import kernel as fused_kernel
from naiad_kernels.silu_and_mul import kernel as gated_kernel
from naiad_kernels.store_kv import LayerCache, Slots
from naiad_kernels.store_kv import kernel as store_kv_kernel

Launch = Callable[[], object]

_NUM_TOKENS = 4
_CPU = torch.device("cpu")
_EPS = 1e-5
OPS = ("small ops", "cache", "attention", "sampling")


@dataclass(frozen=True, slots=True)
class ServedShape:
    """Sizes of a model's layer and of the cache's blocks."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    block_size: int
    dtype: torch.dtype
    cache_dtype: torch.dtype | None = None

    @property
    def label(self) -> str:
        """Name, dtype, block size, and the cache's dtype if it is quantized."""
        dtypes = [str(dtype).removeprefix("torch.") for dtype in (self.dtype, self.cache_dtype) if dtype]
        return " ".join([self.name, dtypes[0], str(self.block_size), *dtypes[1:]])

    @property
    def ops(self) -> tuple[str, ...]:
        """Those of `OPS` that depend on what this shape differs in from others."""
        return ("cache", "attention") if self.cache_dtype else OPS

    @property
    def capabilities(self) -> tuple[int, ...]:
        """GPUs that know its dtypes, 90 for sm_90."""
        return (90,) if self.cache_dtype == torch.float8_e4m3fn else (80, 90)

    def layout(self) -> CacheLayout:
        """As attention needs it."""
        return CacheLayout(
            self.num_heads, self.num_kv_heads, self.head_dim, self.block_size, self.dtype, _CPU
        )


_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32
_INT8, _FP8 = torch.int8, torch.float8_e4m3fn
SHAPES = (
    ServedShape("SmolLM2-135M", 9, 3, 64, 576, 1_536, 49_152, 16, _FP16),
    ServedShape("SmolLM2-135M", 9, 3, 64, 576, 1_536, 49_152, 16, _FP32),
    ServedShape("Llama-3.1-8B", 32, 8, 128, 4_096, 14_336, 128_256, 16, _BF16),
    ServedShape("Llama-3.1-8B", 32, 8, 128, 4_096, 14_336, 128_256, 64, _BF16),
    ServedShape("Llama-3.1-8B", 32, 8, 128, 4_096, 14_336, 128_256, 64, _FP32),
    ServedShape("Qwen2.5-7B", 28, 4, 128, 3_584, 18_944, 152_064, 128, _BF16),
    ServedShape("head_dim 80", 32, 32, 80, 2_560, 10_240, 51_200, 32, _BF16),
    ServedShape("head_dim 96", 32, 32, 96, 3_072, 8_192, 32_064, 64, _BF16),
    ServedShape("head_dim 256", 16, 8, 256, 3_584, 14_336, 256_000, 64, _BF16),
    ServedShape("head_dim 256", 16, 8, 256, 3_584, 14_336, 256_000, 16, _FP32),
    ServedShape("SmolLM2-135M", 9, 3, 64, 576, 1_536, 49_152, 16, _FP16, _INT8),
    ServedShape("Llama-3.1-8B", 32, 8, 128, 4_096, 14_336, 128_256, 16, _BF16, _INT8),
    ServedShape("Llama-3.1-8B", 32, 8, 128, 4_096, 14_336, 128_256, 64, _BF16, _INT8),
    ServedShape("Llama-3.1-8B", 32, 8, 128, 4_096, 14_336, 128_256, 64, _BF16, _FP8),
    ServedShape("Llama-3.1-8B", 32, 8, 128, 4_096, 14_336, 128_256, 64, _FP32, _INT8),
    ServedShape("Qwen2.5-7B", 28, 4, 128, 3_584, 18_944, 152_064, 128, _BF16, _INT8),
    ServedShape("Qwen2.5-7B", 28, 4, 128, 3_584, 18_944, 152_064, 128, _BF16, _FP8),
    ServedShape("head_dim 80", 32, 32, 80, 2_560, 10_240, 51_200, 32, _BF16, _INT8),
    ServedShape("head_dim 96", 32, 32, 96, 3_072, 8_192, 32_064, 64, _BF16, _FP8),
    ServedShape("head_dim 256", 16, 8, 256, 3_584, 14_336, 256_000, 64, _BF16, _INT8),
    ServedShape("head_dim 256", 16, 8, 256, 3_584, 14_336, 256_000, 64, _BF16, _FP8),
)


def launches(shape: ServedShape, op: str) -> Launch:
    """Everything a layer of this shape launches, of one of `OPS`."""
    makers = {"small ops": _small_ops, "cache": _cache_ops, "attention": _attention, "sampling": _sampling}
    return makers[op](shape)


def attention_launch(
    shape: ServedShape, query_lens: Sequence[int], seq_lens: Sequence[int], has_trees: bool = False
) -> Launch:
    """The attention of a step with these lengths."""
    layout = shape.layout()
    tables = [[0] * layout.blocks_for(length) for length in seq_lens]
    trees = [[1 << row for row in range(length)] for length in query_lens] if has_trees else None
    step = plan_device_step(query_lens, seq_lens, tables, layout, trees)
    query = torch.empty(sum(query_lens), shape.num_heads, shape.head_dim, dtype=shape.dtype)
    cache = _cache(shape)
    return lambda: attention_kernel.paged_attention(query, cache, step)


def _attention(shape: ServedShape) -> Launch:
    """One token, a draft of four, as many as one program takes, a chunk, and two trees of drafts.

    All contexts are split.
    """
    group_size = shape.num_heads // shape.num_kv_heads
    steps = [attention_launch(shape, [length], [1_000]) for length in (1, 5, 64 // group_size, 500)]
    steps += [attention_launch(shape, [length], [1_000], has_trees=True) for length in (5, 16)]
    return lambda: [launch() for launch in steps]


def _small_ops(shape: ServedShape) -> Launch:
    hidden = torch.empty(_NUM_TOKENS, shape.hidden_size, dtype=shape.dtype)
    norm = torch.empty(shape.hidden_size, dtype=shape.dtype)
    rotated = _projected(shape)[:, : shape.num_heads + shape.num_kv_heads]
    head_norms = torch.empty(rotated.shape[1:], dtype=shape.dtype)
    angles = torch.empty(_NUM_TOKENS, 1, shape.head_dim, dtype=shape.dtype)
    gate_up = torch.empty(_NUM_TOKENS, 2 * shape.intermediate_size, dtype=shape.dtype)

    def launch() -> None:
        rms_norm_kernel.rms_norm(hidden, norm, _EPS)
        rms_norm_kernel.add_rms_norm(hidden, hidden, norm, _EPS)
        rms_norm_kernel.rms_norm(rotated, head_norms, _EPS)
        rotary_kernel.rotary(rotated, angles, angles)
        for activation in gated_kernel.ACTIVATIONS:
            gated_kernel.activate_and_mul(gate_up, activation)

    return launch


def _cache_ops(shape: ServedShape) -> Launch:
    heads = _projected(shape)
    num_rotated = shape.num_heads + shape.num_kv_heads
    key, value = heads[:, shape.num_heads : num_rotated], heads[:, num_rotated:]
    head_norms = torch.empty(num_rotated, shape.head_dim, dtype=shape.dtype)
    angles = torch.empty(_NUM_TOKENS, 1, shape.head_dim, dtype=shape.dtype)
    slot = torch.zeros(_NUM_TOKENS, dtype=torch.int64)
    slots, cache = Slots(slot, slot), _cache(shape)

    def launch() -> None:
        store_kv_kernel.store_kv(key, value, cache, slots)
        for norms in (None, head_norms):
            fused_kernel.rotary_store_kv(heads, (angles, angles), (norms, _EPS), cache, slots)

    return launch


def _sampling(shape: ServedShape) -> Launch:
    """Logits are float32 whatever the model's dtype."""
    logits = torch.empty(_NUM_TOKENS, shape.vocab_size)
    best = torch.empty(_NUM_TOKENS)
    wide = torch.empty(_NUM_TOKENS, dtype=torch.float64)
    whole = torch.empty(_NUM_TOKENS, dtype=torch.int64)

    def launch() -> None:
        threshold_kernel.kept_threshold(logits, best, wide, whole, wide, wide)
        gumbel_kernel.gumbel_argmax(logits, best, wide, wide, whole)

    return launch


def _projected(shape: ServedShape) -> torch.Tensor:
    """Queries, keys and values of a step."""
    num_projected = shape.num_heads + 2 * shape.num_kv_heads
    return torch.empty(_NUM_TOKENS, num_projected, shape.head_dim, dtype=shape.dtype)


def _cache(shape: ServedShape) -> LayerCache:
    rows = (2, shape.num_kv_heads, shape.block_size)
    part = torch.empty(*rows, shape.head_dim, dtype=shape.cache_dtype or shape.dtype)
    scale = torch.empty(rows) if shape.cache_dtype else None
    return LayerCache(part, part, scale, scale)
