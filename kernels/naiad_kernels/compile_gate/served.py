"""The shapes that kernels are compiled for before a GPU is at hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from naiad_kernels.gumbel_argmax import kernel as gumbel_kernel
from naiad_kernels.kept_threshold import kernel as threshold_kernel
from naiad_kernels.lora import kernel as lora_kernel
from naiad_kernels.lora import plan_lora
from naiad_kernels.paged_attention import kernel as attention_kernel
from naiad_kernels.paged_attention.device_step import plan_device_step
from naiad_kernels.paged_attention.layout import CacheLayout
from naiad_kernels.rejection_sampling import Drafts, TargetRows
from naiad_kernels.rejection_sampling import kernel as rejection_kernel
from naiad_kernels.rms_norm import kernel as rms_norm_kernel
from naiad_kernels.rotary import kernel as rotary_kernel
from naiad_kernels.rotary_store_kv import kernel as fused_kernel
from naiad_kernels.silu_and_mul import kernel as silu_kernel
from naiad_kernels.store_kv import Slots
from naiad_kernels.store_kv import kernel as store_kv_kernel
from naiad_kernels.top_log_probs import kernel as log_probs_kernel

Launch = Callable[[], object]

_NUM_TOKENS = 4
_CPU = torch.device("cpu")
_EPS = 1e-5


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

    @property
    def label(self) -> str:
        """Name, dtype and block size."""
        return f"{self.name} {str(self.dtype).removeprefix('torch.')} {self.block_size}"

    def layout(self) -> CacheLayout:
        """As attention needs it."""
        return CacheLayout(
            self.num_heads, self.num_kv_heads, self.head_dim, self.block_size, self.dtype, _CPU
        )


_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32
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
)
OPS = ("small ops", "attention", "sampling", "adapters")


def launches(shape: ServedShape, op: str) -> Launch:
    """Everything a layer of this shape launches, of one of `OPS`."""
    of_op = {"small ops": _small_ops, "attention": _attention, "sampling": _sampling, "adapters": _adapters}
    return of_op[op](shape)


def attention_launch(shape: ServedShape, query_lens: Sequence[int], seq_lens: Sequence[int]) -> Launch:
    """The attention of a step with these lengths."""
    layout = shape.layout()
    tables = [[0] * layout.blocks_for(length) for length in seq_lens]
    step = plan_device_step(query_lens, seq_lens, tables, layout)
    query = torch.empty(sum(query_lens), shape.num_heads, shape.head_dim, dtype=shape.dtype)
    cache = _cache(shape)
    return lambda: attention_kernel.paged_attention(query, cache, cache, step)


def _attention(shape: ServedShape) -> Launch:
    """One token, a draft of four, as many as one program takes, and a chunk, all of split contexts."""
    group_size = shape.num_heads // shape.num_kv_heads
    steps = [attention_launch(shape, [length], [1_000]) for length in (1, 5, 64 // group_size, 500)]
    return lambda: [launch() for launch in steps]


def _small_ops(shape: ServedShape) -> Launch:
    hidden = torch.empty(_NUM_TOKENS, shape.hidden_size, dtype=shape.dtype)
    norm = torch.empty(shape.hidden_size, dtype=shape.dtype)
    num_rotated = shape.num_heads + shape.num_kv_heads
    num_projected = num_rotated + shape.num_kv_heads
    heads = torch.empty(_NUM_TOKENS, num_projected, shape.head_dim, dtype=shape.dtype)
    rotated, value = heads[:, :num_rotated], heads[:, num_rotated:]
    head_norms = torch.empty(num_rotated, shape.head_dim, dtype=shape.dtype)
    angles = torch.empty(_NUM_TOKENS, 1, shape.head_dim, dtype=shape.dtype)
    gate_up = torch.empty(_NUM_TOKENS, 2 * shape.intermediate_size, dtype=shape.dtype)
    slots = torch.zeros(_NUM_TOKENS, dtype=torch.int64)
    cache = _cache(shape)

    def launch() -> None:
        rms_norm_kernel.rms_norm(hidden, norm, _EPS)
        rms_norm_kernel.add_rms_norm(hidden, hidden, norm, _EPS)
        rms_norm_kernel.rms_norm(rotated, head_norms, _EPS)
        rotary_kernel.rotary(rotated, angles, angles)
        store_kv_kernel.store_kv(rotated[:, shape.num_heads :], value, cache, cache, slots, slots)
        for norms in (None, head_norms):
            fused_kernel.rotary_store_kv(
                heads, (angles, angles), (norms, _EPS), cache, cache, Slots(slots, slots)
            )
        silu_kernel.silu_and_mul(gate_up)

    return launch


def _sampling(shape: ServedShape) -> Launch:
    """Logits are float32 whatever the model's dtype."""
    logits = torch.empty(_NUM_TOKENS, shape.vocab_size)
    best = torch.empty(_NUM_TOKENS)
    wide = torch.empty(_NUM_TOKENS, dtype=torch.float64)
    whole = torch.empty(_NUM_TOKENS, dtype=torch.int64)
    target = TargetRows(logits, best, wide, wide, whole)
    starts = torch.zeros(2, dtype=torch.int32)

    def launch() -> None:
        threshold_kernel.kept_threshold(logits, best, wide, whole, wide, wide)
        gumbel_kernel.gumbel_argmax(logits, best, wide, wide, whole)
        for probs in (None, logits):
            rejection_kernel.rejection_sampling(target, Drafts(whole, probs), starts, 5)
        for num_top in (0, 20, 64):
            log_probs_kernel.top_log_probs(logits, whole, num_top)

    return launch


def _adapters(shape: ServedShape) -> Launch:
    """Adapters of queries, keys and values, of several ranks."""
    plan = plan_lora(torch.zeros(_NUM_TOKENS, dtype=torch.int64), 2)
    sizes = tuple(n * shape.head_dim for n in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads))
    hidden = torch.empty(_NUM_TOKENS, shape.hidden_size, dtype=shape.dtype)
    out = torch.empty(_NUM_TOKENS, sum(sizes), dtype=shape.dtype)

    def launch() -> None:
        for rank in (16, 64, 128):
            down = torch.empty(2, 3, rank, shape.hidden_size, dtype=shape.dtype)
            up = torch.empty(2, sum(sizes), rank, dtype=shape.dtype)
            shrunk = lora_kernel.lora_shrink(hidden, down, plan)
            lora_kernel.lora_expand(out, shrunk, up, sizes, plan)

    return launch


def _cache(shape: ServedShape) -> torch.Tensor:
    return torch.empty(2, shape.num_kv_heads, shape.block_size, shape.head_dim, dtype=shape.dtype)
