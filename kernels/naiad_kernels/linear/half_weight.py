"""`linear` in float32 on a CPU over weights kept in 16 bits, for checkpoints stored in 16 bits.

A step of few tokens takes as long as reading its weights, so half the bytes double the speed; where
arithmetic is the bottleneck, FBGEMM is no slower than the plain product. Converting float16 to
float32 is exact, and so is converting the weights of a bfloat16 checkpoint to float16 unless they are
very small: products and sums are those of float32.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

# A weight may change by this fraction of the matrix's largest: half a unit in the last place of a float32.
_MAX_RELATIVE_CHANGE = 2.0**-24


@functools.cache
def has_fbgemm() -> bool:
    """Whether torch can run FBGEMM here: an x86 build, and a CPU with AVX2."""
    if torch.backends.quantized.engine not in ("x86", "fbgemm"):
        return False
    return torch.backends.cpu.get_cpu_capability() != "DEFAULT"


def can_narrow(matrix: torch.Tensor) -> bool:
    """Whether float16 represents the weight so precisely that float32 results are not affected.

    Args:
        matrix: `[out_features, in_features]`.
    """
    if matrix.device.type != "cpu" or matrix.dtype != torch.float32 or not has_fbgemm():
        return False
    change = (matrix.half().float() - matrix).abs().max()
    return bool(change <= _MAX_RELATIVE_CHANGE * matrix.abs().max())


@dataclass(frozen=True, slots=True)
class HalfWeight:
    """A weight as float16 in FBGEMM's tiles, with its bias in float32; only FBGEMM can read `packed`."""

    packed: torch.ScriptObject
    in_features: int
    out_features: int

    @classmethod
    def of(cls, matrix: torch.Tensor, bias: torch.Tensor | None) -> HalfWeight:
        """Convert a weight for which `can_narrow` is true."""
        out_features, in_features = matrix.shape
        packed = torch.ops.quantized.linear_prepack_fp16(matrix.contiguous(), bias)
        return cls(packed, in_features, out_features)

    def multiply(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """Compute `linear` for this layout."""
        product: torch.Tensor = torch.ops.quantized.linear_dynamic_fp16(x, self.packed)
        return product if residual is None else product.add_(residual)
