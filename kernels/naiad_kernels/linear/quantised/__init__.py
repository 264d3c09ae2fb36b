"""Methods of `linear` whose weights are stored in four or eight bits."""

from __future__ import annotations

import torch

from naiad_kernels.linear.quantised import reference
from naiad_kernels.linear.quantised.kept import GPUForm, KeptWeight, MXFP4Weight, ReorderedNibbles
from naiad_kernels.linear.quantised.repack import repack_mxfp4, repack_nibbles, repack_reordered
from naiad_kernels.linear.quantised.weights import SPAN, ByteTokens, ByteWeight, W4Weight

__all__ = [
    "ByteTokens",
    "ByteWeight",
    "GPUForm",
    "KeptWeight",
    "MXFP4Weight",
    "ReorderedNibbles",
    "W4Weight",
    "quantize_tokens",
    "repack_mxfp4",
    "repack_nibbles",
    "repack_reordered",
    "w4a16_linear",
    "w8a8_linear",
    "w8a16_linear",
]


def w4a16_linear(x: torch.Tensor, weight: W4Weight) -> torch.Tensor:
    """Multiply by four-bit weights: x · Wᵀ + bias with W = (code − zero) · scale, or MXFP4.

    Args:
        x: `[num_tokens, in_features]`, float16, bfloat16 or float32.
        weight: from a function of `repack`, on the device of x.

    Returns:
        `[num_tokens, out_features]`, dtype of `x`, summed in float32 in chunks of inputs that depend
        on the layer alone, not on the number of tokens.
    """
    assert x.shape[1:] == (weight.in_features,), (x.shape, weight.in_features)
    if x.device.type == "cuda":
        from naiad_kernels.linear.quantised import kernel

        return kernel.w4a16_linear(x, weight)
    return reference.w4a16_linear(x, weight)


def w8a16_linear(x: torch.Tensor, weight: ByteWeight) -> torch.Tensor:
    """Multiply by int8 weights with a scale for each output: (x · valuesᵀ) · scales + bias.

    Args:
        x: `[num_tokens, in_features]`, float16, bfloat16 or float32.
        weight: int8, on the device of x.

    Returns:
        The same as for `w4a16_linear`.
    """
    assert x.shape[1:] == (weight.in_features,), (x.shape, weight.in_features)
    assert weight.values.dtype == torch.int8, weight.values.dtype
    if x.device.type == "cuda":
        from naiad_kernels.linear.quantised import kernel

        return kernel.w8a16_linear(x, weight)
    return reference.w8a16_linear(x, weight)


def w8a8_linear(tokens: ByteTokens, weight: ByteWeight, dtype: torch.dtype) -> torch.Tensor:
    """Multiply eight bits by eight: (values · weight valuesᵀ) · output scales · token scales + bias.

    If the weight has groups of inputs, the products of each `SPAN` inputs are scaled, then added.

    Args:
        tokens: from `quantize_tokens`, or from an op that quantizes its output in the same way; by span if
            the weight has groups.
        weight: int8 or float8_e4m3fn as the tokens are, on their device.
        dtype: the result's dtype: float16, bfloat16 or float32.

    Returns:
        `[num_tokens, out_features]`. Chunks of inputs, as `w4a16_linear` has them, are summed in int32 or
        float32, and added in float32.

    Raises:
        ValueError: FP8 on a GPU that is older than Hopper (sm_90).
    """
    assert tokens.values.shape[1:] == (weight.in_features,), (tokens.values.shape, weight.in_features)
    num_tokens, in_features = tokens.values.shape
    scales_shape = (num_tokens,) if weight.group_size is None else (-(-in_features // SPAN), num_tokens)
    assert tokens.scales.shape == scales_shape, (tokens.scales.shape, scales_shape)
    assert tokens.values.dtype == weight.values.dtype, (tokens.values.dtype, weight.values.dtype)
    if tokens.values.device.type == "cuda":
        from naiad_kernels.linear.quantised import kernel

        return kernel.w8a8_linear(tokens, weight, dtype)
    return reference.w8a8_linear(tokens, weight, dtype)


def quantize_tokens(
    x: torch.Tensor, dtype: torch.dtype = torch.float8_e4m3fn, by_span: bool = False
) -> ByteTokens:
    """Scale each token so that its largest magnitude is the dtype's largest number, and round.

    Args:
        x: `[num_tokens, dim]`, floating dtype.
        dtype: int8, to ±127, or float8_e4m3fn, to ±448.
        by_span: scale each `SPAN` inputs of a token apart, the last of which may be fewer.

    Returns:
        Values and scales; where all is zero the scale is 0, where something is not finite it is NaN.

    Raises:
        ValueError: FP8 on a GPU that is older than Hopper (sm_90).
    """
    assert x.dim() == 2, x.shape
    if x.device.type == "cuda":
        from naiad_kernels.linear.quantised import kernel

        return kernel.quantize_tokens(x, dtype, by_span)
    return reference.quantize_tokens(x, dtype, by_span)
