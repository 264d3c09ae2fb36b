"""Linear layers over weights that are laid out once, at load, for the device they run on."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from naiad_kernels.linear import half_weight, onednn, reference

__all__ = ["LinearWeight", "linear", "prepare_linear"]


@dataclass(frozen=True, slots=True)
class PlainWeight:
    """A weight as it came: `[out_features, in_features]`, bias `[out_features]` or None."""

    matrix: torch.Tensor
    bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class OneDNNWeight:
    """A weight in oneDNN's layout; only oneDNN can read `matrix`."""

    matrix: torch.Tensor
    bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class FixedOrderWeight:
    """A weight as it came, multiplied in an order that does not depend on the number of tokens."""

    matrix: torch.Tensor
    bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """A weight matrix in the layout its device multiplies fastest.

    Attributes:
        data: the matrix and its bias, opaque outside this package.
    """

    data: PlainWeight | OneDNNWeight | FixedOrderWeight | half_weight.HalfWeight
    in_features: int
    out_features: int


def prepare_linear(
    matrix: torch.Tensor, bias: torch.Tensor | None = None, *, batch_invariant: bool = False
) -> LinearWeight:
    """Lay a weight out for `linear`; drop `matrix` afterwards unless it is needed elsewhere.

    Args:
        matrix: `[out_features, in_features]`, floating dtype, on the device it will run on.
        bias: `[out_features]`, same dtype, or None.
        batch_invariant: on a GPU, a token's result shall not depend on the others, to the last bit.
    """
    out_features, in_features = matrix.shape
    assert bias is None or bias.shape == (out_features,), bias.shape
    data = FixedOrderWeight(matrix.contiguous(), bias) if batch_invariant else _lay_out(matrix, bias)
    return LinearWeight(data, in_features, out_features)


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
    data = weight.data
    if isinstance(data, PlainWeight):
        return reference.linear(x, data.matrix, data.bias, residual)
    if isinstance(data, OneDNNWeight):
        return onednn.linear(x, data.matrix, data.bias, residual)
    if isinstance(data, FixedOrderWeight):
        from naiad_kernels.linear import fixed_order

        product = fixed_order.linear(x, data.matrix, data.bias)
        return product if residual is None else product.add_(residual)
    return half_weight.linear(x, data, residual)


def _lay_out(
    matrix: torch.Tensor, bias: torch.Tensor | None
) -> PlainWeight | OneDNNWeight | half_weight.HalfWeight:
    if half_weight.can_narrow(matrix):
        return half_weight.narrow(matrix, bias)
    if onednn.can_pack(matrix):
        return OneDNNWeight(onednn.pack(matrix), bias)
    return PlainWeight(matrix, bias)
