"""`linear` on a CPU through oneDNN, over a weight that is reordered once.

`F.linear` passes a float32 weight to the BLAS library, which packs it again in every call; for a
few tokens the packing costs more than the product.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

# The reordered layout suits every batch from one token up; measured best over 1 … 512 tokens.
_LAYOUT_TOKENS = 32


@functools.cache
def computes_in_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 in hardware (avx512_bf16 or AMX); without, it is 8× slower."""
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(bool(getattr(torch.cpu, name, bool)()) for name in probes)


@functools.cache
def _has_onednn() -> bool:
    if not torch._C._has_mkldnn:
        return False
    return hasattr(torch.ops.mkldnn, "_linear_pointwise") and hasattr(
        torch.ops.mkldnn, "_reorder_linear_weight"
    )


def can_pack(matrix: torch.Tensor) -> bool:
    """Whether oneDNN can multiply by a weight of this device and dtype, and is faster."""
    if matrix.device.type != "cpu" or not _has_onednn():
        return False
    return matrix.dtype == torch.float32 or (matrix.dtype == torch.bfloat16 and computes_in_bfloat16())


@dataclass(frozen=True, slots=True)
class OneDNNWeight:
    """A weight in oneDNN's layout; only oneDNN can read `packed`."""

    packed: torch.Tensor
    bias: torch.Tensor | None
    in_features: int
    out_features: int

    @classmethod
    def of(cls, matrix: torch.Tensor, bias: torch.Tensor | None) -> OneDNNWeight:
        """Reorder a weight for which `can_pack` is true."""
        out_features, in_features = matrix.shape
        packed = torch.ops.mkldnn._reorder_linear_weight(matrix.contiguous(), _LAYOUT_TOKENS)
        return cls(packed, bias, in_features, out_features)

    def multiply(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """Compute `linear` for this layout; the residual is added inside the product."""
        pointwise = torch.ops.mkldnn._linear_pointwise
        result: torch.Tensor
        if residual is None:
            result = pointwise(x, self.packed, self.bias, "none", [], "")
        else:
            result = pointwise.binary(x, residual, self.packed, self.bias, "add")
        return result
