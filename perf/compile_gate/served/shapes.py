"""The shapes for which kernels are compiled without a GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from naiad_kernels.paged_attention.layout import CacheLayout

NUM_TOKENS = 4
_CPU = torch.device("cpu")
_QUANTISED_OPS = ("quantised, one token", "quantised, many tokens")
OPS = ("small ops", "cache", "attention", "sampling", "adapters", "fixed order", *_QUANTISED_OPS)
# The compiled code of quantised products does not depend on layer sizes: one shape per dtype is enough.
_QUANTISED = ("SmolLM2-135M float16 16", "Llama-3.1-8B bfloat16 64", "Llama-3.1-8B float32 64")


@dataclass(frozen=True, slots=True)
class ServedShape:
    """Sizes of a model's layers and of the cache's blocks.

    Attributes:
        windows: the windows of its layers; 0: a layer without a window.
        soft_cap: the soft cap of attention scores; 0: none.
        has_wide_norms: norm weights are float32 although activations have fewer bits.
    """

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
    windows: tuple[int, ...] = (0,)
    soft_cap: float = 0.0
    has_wide_norms: bool = False

    @property
    def norm_dtype(self) -> torch.dtype:
        """The dtype of the norms' weights."""
        return torch.float32 if self.has_wide_norms else self.dtype

    @property
    def label(self) -> str:
        """Name, dtype, block size, and the cache's dtype if it is quantized."""
        dtypes = [str(dtype).removeprefix("torch.") for dtype in (self.dtype, self.cache_dtype) if dtype]
        return " ".join([self.name, dtypes[0], str(self.block_size), *dtypes[1:]])

    @property
    def ops(self) -> tuple[str, ...]:
        """The `OPS` that depend on the properties that distinguish this shape from others."""
        if self.cache_dtype:
            return ("cache", "attention")
        if self.has_wide_norms:
            return ("small ops", "cache", "attention")
        return tuple(op for op in OPS if op not in _QUANTISED_OPS or self.label in _QUANTISED)

    @property
    def capabilities(self) -> tuple[int, ...]:
        """The compute capabilities that support its dtypes, 90 for sm_90."""
        return (90,) if self.cache_dtype == torch.float8_e4m3fn else (80, 90)

    def layout(self) -> CacheLayout:
        """The cache layout for attention."""
        return CacheLayout(
            self.num_heads, self.num_kv_heads, self.head_dim, self.block_size, self.dtype, _CPU
        )


_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32
_INT8, _FP8 = torch.int8, torch.float8_e4m3fn
_SMOL = ServedShape("SmolLM2-135M", 9, 3, 64, 576, 1_536, 49_152, 16, _FP16)
_LLAMA = ServedShape("Llama-3.1-8B", 32, 8, 128, 4_096, 14_336, 128_256, 64, _BF16)
_QWEN = ServedShape("Qwen2.5-7B", 28, 4, 128, 3_584, 18_944, 152_064, 128, _BF16)
_HEAD_80 = ServedShape("head_dim 80", 32, 32, 80, 2_560, 10_240, 51_200, 32, _BF16)
_HEAD_96 = ServedShape("head_dim 96", 32, 32, 96, 3_072, 8_192, 32_064, 64, _BF16)
_HEAD_256 = ServedShape("head_dim 256", 16, 8, 256, 3_584, 14_336, 256_000, 64, _BF16)
_GEMMA_2 = replace(_HEAD_256, name="Gemma-2-9B", windows=(4_096, 0), soft_cap=50.0, has_wide_norms=True)
_GEMMA_3 = ServedShape(
    "Gemma-3-4B", 8, 4, 256, 2_560, 10_240, 262_208, 64, _BF16, windows=(1_024, 0), has_wide_norms=True
)
SHAPES = (
    _SMOL,
    replace(_SMOL, block_size=64, dtype=_BF16),
    replace(_SMOL, dtype=_FP32),
    replace(_LLAMA, block_size=16),
    _LLAMA,
    replace(_LLAMA, dtype=_FP16),
    replace(_LLAMA, dtype=_FP32),
    _QWEN,
    _HEAD_80,
    _HEAD_96,
    _HEAD_256,
    replace(_HEAD_256, block_size=16, dtype=_FP32),
    _GEMMA_2,
    replace(_GEMMA_2, block_size=16, dtype=_FP32),
    _GEMMA_3,
    replace(_GEMMA_3, block_size=16, dtype=_FP16),
    replace(_SMOL, cache_dtype=_INT8),
    replace(_LLAMA, block_size=16, cache_dtype=_INT8),
    replace(_LLAMA, cache_dtype=_INT8),
    replace(_LLAMA, cache_dtype=_FP8),
    replace(_LLAMA, dtype=_FP32, cache_dtype=_INT8),
    replace(_QWEN, cache_dtype=_INT8),
    replace(_QWEN, cache_dtype=_FP8),
    replace(_HEAD_80, cache_dtype=_INT8),
    replace(_HEAD_96, cache_dtype=_FP8),
    replace(_HEAD_256, cache_dtype=_INT8),
    replace(_HEAD_256, cache_dtype=_FP8),
)
