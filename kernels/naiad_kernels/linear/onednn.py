"""`linear` on a CPU through oneDNN, over a weight that was reordered once.

`F.linear` hands a float32 weight to the BLAS library, which packs it again in every call; for a
few tokens that packing costs more than the product.
"""

from __future__ import annotations

import functools

import torch

# The reordered layout suits every batch from one token up; measured best over 1 … 512 tokens.
_LAYOUT_TOKENS = 32


@functools.cache
def computes_in_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 in hardware (avx512_bf16 or AMX); else it is 8× slower."""
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
    """Whether `pack` and `linear` work for a weight of this device and dtype, and pay."""
    if matrix.device.type != "cpu" or not _has_onednn():
        return False
    return matrix.dtype == torch.float32 or (matrix.dtype == torch.bfloat16 and computes_in_bfloat16())


def pack(matrix: torch.Tensor) -> torch.Tensor:
    """The weight in oneDNN's layout: a copy that only `linear` below understands."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(matrix.contiguous(), _LAYOUT_TOKENS)
    return packed


def linear(
    x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None
) -> torch.Tensor:
    """See the public op; `packed` comes from `pack`, the residual is added inside the product."""
    result: torch.Tensor
    if residual is None:
        result = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    else:
        result = torch.ops.mkldnn._linear_pointwise.binary(x, residual, packed, bias, "add")
    return result
