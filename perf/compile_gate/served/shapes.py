"""The shapes that kernels are compiled for before a GPU is at hand."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from naiad_kernels.paged_attention.layout import CacheLayout

NUM_TOKENS = 4
_CPU = torch.device("cpu")
_QUANTISED_OPS = ("quantised, one token", "quantised, many tokens")
OPS = ("small ops", "cache", "attention", "sampling", "adapters", "fixed order", *_QUANTISED_OPS)
# Layers' sizes are no part of what quantised products compile: one shape of each dtype stands for all.
_QUANTISED = ("SmolLM2-135M float16 16", "Llama-3.1-8B bfloat16 64", "Llama-3.1-8B float32 64")


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
        if self.cache_dtype:
            return ("cache", "attention")
        return tuple(op for op in OPS if op not in _QUANTISED_OPS or self.label in _QUANTISED)

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
    ServedShape("SmolLM2-135M", 9, 3, 64, 576, 1_536, 49_152, 64, _BF16),
    ServedShape("SmolLM2-135M", 9, 3, 64, 576, 1_536, 49_152, 16, _FP32),
    ServedShape("Llama-3.1-8B", 32, 8, 128, 4_096, 14_336, 128_256, 16, _BF16),
    ServedShape("Llama-3.1-8B", 32, 8, 128, 4_096, 14_336, 128_256, 64, _BF16),
    ServedShape("Llama-3.1-8B", 32, 8, 128, 4_096, 14_336, 128_256, 64, _FP16),
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
