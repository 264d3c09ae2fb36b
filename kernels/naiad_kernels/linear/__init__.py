"""Linear layers over weights that are laid out once, at load, by the method that suits the device."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch

from naiad_kernels.linear import half_weight, onednn
from naiad_kernels.linear.fixed_order import FixedOrderWeight
from naiad_kernels.linear.half_weight import HalfWeight
from naiad_kernels.linear.onednn import OneDNNWeight
from naiad_kernels.linear.options import LoadOptions
from naiad_kernels.linear.plain import PlainWeight
from naiad_kernels.linear.quantised.kept import KeptWeight, MXFP4Weight, ReorderedNibbles
from naiad_kernels.linear.quantised.repack import repack_mxfp4, repack_nibbles, repack_reordered
from naiad_kernels.linear.quantised.rounded import round_weight
from naiad_kernels.linear.quantised.weights import ByteWeight, W4Weight, has_fp8
from naiad_kernels.native.nibbles import NibbleWeight
from naiad_kernels.native.panels import NativeWeight
from naiad_kernels.recording import recordable

__all__ = ["LinearWeight", "LoadOptions", "linear", "prepare_linear"]


class LinearWeight(Protocol):
    """A weight in the layout of one method; the methods are `PlainWeight` and its siblings."""

    @property
    def in_features(self) -> int:
        """Number of input features."""

    @property
    def out_features(self) -> int:
        """Number of output features."""

    def multiply(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """Compute `linear` for this layout."""


def prepare_linear(
    matrix: torch.Tensor | KeptWeight,
    bias: torch.Tensor | None = None,
    options: LoadOptions | None = None,
) -> LinearWeight:
    """Choose the method for a weight and lay the weight out for it.

    Drop `matrix` afterwards unless it is needed elsewhere.

    Args:
        matrix: `[out_features, in_features]`, floating dtype, on the device it will run on. Native kernels
            that compute in float32 take bfloat16 too. Numbers of four bits, on the CPU, are for native
            kernels and for options with `packed`, what else a checkpoint's reader keeps only for these.
        bias: `[out_features]`, same dtype, or None.
        options: how the model is loaded; None: the defaults.
    """
    if not isinstance(matrix, torch.Tensor):
        if options is None or not options.packed:
            assert isinstance(matrix, NibbleWeight), type(matrix)
            return NativeWeight.of_nibbles(matrix, bias)
        packed = _packed(matrix, bias, options.device)
        if packed is not None:
            return packed
        matrix = matrix.matrix().to(options.device, options.dtype)
    assert bias is None or bias.shape == matrix.shape[:1], bias.shape
    if options is not None and options.native:
        if options.quantization != "none":
            return _rounded(matrix, bias, options.quantization)
        return NativeWeight.of(matrix, bias, options.dtype)
    if options is not None and options.quantization != "none":
        assert options.packed, options
        return round_weight(matrix, bias, options.quantization)
    if options is not None and options.batch_invariant:
        return FixedOrderWeight(matrix.contiguous(), bias)
    if half_weight.can_narrow(matrix):
        return HalfWeight.of(matrix, bias)
    if onednn.can_pack(matrix):
        return OneDNNWeight.of(matrix, bias)
    return PlainWeight(matrix, bias)


def _packed(
    matrix: KeptWeight, bias: torch.Tensor | None, device: torch.device
) -> W4Weight | ByteWeight | None:
    """In the layout of the kernels for a GPU; None: they cannot multiply by it on this device."""
    if isinstance(matrix, NibbleWeight):
        return repack_nibbles(matrix, bias, device)
    if isinstance(matrix, ReorderedNibbles):
        return repack_reordered(matrix, bias, device)
    if isinstance(matrix, MXFP4Weight):
        return repack_mxfp4(matrix, bias, device)
    if matrix.values.dtype == torch.float8_e4m3fn and not has_fp8(device):
        return None
    return replace(matrix, values=matrix.values.to(device), scales=matrix.scales.to(device), bias=bias)


def _rounded(matrix: torch.Tensor, bias: torch.Tensor | None, quantization: str) -> NativeWeight:
    """In four bits if float16 holds the scales, else in eight."""
    nibbles = None
    if quantization == "int4":
        nibbles = NibbleWeight.aligned(matrix) or NibbleWeight.rounded(matrix)
    return NativeWeight.quantised(matrix, bias) if nibbles is None else NativeWeight.of_nibbles(nibbles, bias)


@recordable
def linear(x: torch.Tensor, weight: LinearWeight, residual: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply by the weight, add its bias, add the residual: x · matrixᵀ + bias + residual.

    Args:
        x: `[num_tokens, in_features]`, dtype of the weight; float16, bfloat16 or float32 if the weight
            is quantised.
        weight: from `prepare_linear`, or a quantised weight.
        residual: `[num_tokens, out_features]`, added to the product; not changed.

    Returns:
        `[num_tokens, out_features]`, a new tensor.
    """
    assert x.shape[-1] == weight.in_features, (x.shape, weight.in_features)
    return weight.multiply(x, residual)
