"""Linear layers over weights that are laid out once, at load, for the device they run on."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from naiad_kernels.linear import cpu, reference

__all__ = ["LinearWeight", "linear", "prepare_linear"]


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """A weight matrix in the layout its device multiplies fastest.

    Attributes:
        matrix: `[out_features, in_features]`; opaque when `is_packed`.
        bias: `[out_features]` or None.
        is_packed: whether `matrix` is in the CPU library's own layout.
    """

    matrix: torch.Tensor
    bias: torch.Tensor | None
    in_features: int
    out_features: int
    is_packed: bool


def prepare_linear(matrix: torch.Tensor, bias: torch.Tensor | None = None) -> LinearWeight:
    """Lay a weight out for `linear`; drop `matrix` afterwards unless it is needed elsewhere.

    Args:
        matrix: `[out_features, in_features]`, floating dtype, on the device it will run on.
        bias: `[out_features]`, same dtype, or None.
    """
    out_features, in_features = matrix.shape
    assert bias is None or bias.shape == (out_features,), bias.shape
    packed = cpu.pack(matrix) if cpu.can_pack(matrix) else None
    return LinearWeight(
        matrix=matrix if packed is None else packed,
        bias=bias,
        in_features=in_features,
        out_features=out_features,
        is_packed=packed is not None,
    )


def linear(x: torch.Tensor, weight: LinearWeight, residual: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply by the weight, add its bias, add the residual: x · matrixᵀ + bias + residual.

    Args:
        x: `[num_tokens, in_features]`, dtype of the weight.
        weight: from `prepare_linear`.
        residual: `[num_tokens, out_features]`, added to the product; not changed.

    Returns:
        `[num_tokens, out_features]`, a new tensor.
    """
    assert x.shape[-1] == weight.in_features, (x.shape, weight.in_features)
    if weight.is_packed:
        return cpu.linear(x, weight.matrix, weight.bias, residual)
    return reference.linear(x, weight.matrix, weight.bias, residual)
