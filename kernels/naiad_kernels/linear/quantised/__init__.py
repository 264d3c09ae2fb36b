"""Methods of `linear` whose weights are stored in four or eight bits."""

from __future__ import annotations

import torch

from naiad_kernels.linear.quantised import reference
from naiad_kernels.linear.quantised.repack import Int4Tensors, repack_awq, repack_gptq
from naiad_kernels.linear.quantised.weights import ByteWeight, FP8Tokens, W4Weight

__all__ = [
    "ByteWeight",
    "FP8Tokens",
    "Int4Tensors",
    "W4Weight",
    "fp8_linear",
    "quantize_tokens",
    "repack_awq",
    "repack_gptq",
    "w4a16_linear",
    "w8a16_linear",
]


def w4a16_linear(x: torch.Tensor, weight: W4Weight) -> torch.Tensor:
    """Multiply by four-bit weights: x · Wᵀ + bias with W = (code − zero) · scale.

    Args:
        x: `[num_tokens, in_features]`, float16, bfloat16 or float32.
        weight: from `repack_gptq` or `repack_awq`, on the device of x.

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


def fp8_linear(tokens: FP8Tokens, weight: ByteWeight, dtype: torch.dtype) -> torch.Tensor:
    """Multiply in FP8: (values · weight valuesᵀ) · output scales · token scales + bias.

    Args:
        tokens: from `quantize_tokens`, or from an op that quantizes its output in the same way.
        weight: float8_e4m3fn, on the device of the tokens.
        dtype: the result's dtype: float16, bfloat16 or float32.

    Returns:
        `[num_tokens, out_features]`, summed in float32, as `w4a16_linear`.

    Raises:
        ValueError: the GPU is older than Hopper (sm_90).
    """
    assert tokens.values.shape[1:] == (weight.in_features,), (tokens.values.shape, weight.in_features)
    assert tokens.scales.shape == tokens.values.shape[:1], (tokens.scales.shape, tokens.values.shape)
    assert tokens.values.dtype == weight.values.dtype == torch.float8_e4m3fn, weight.values.dtype
    if tokens.values.device.type == "cuda":
        from naiad_kernels.linear.quantised import kernel

        return kernel.fp8_linear(tokens, weight, dtype)
    return reference.fp8_linear(tokens, weight, dtype)


def quantize_tokens(x: torch.Tensor) -> FP8Tokens:
    """Scale each token so that its largest magnitude is FP8's largest, 448, and round to FP8.

    Args:
        x: `[num_tokens, dim]`, floating dtype.

    Returns:
        Values and scales; a token of zeros has scale 0, one that is not finite has scale NaN.

    Raises:
        ValueError: the GPU is older than Hopper (sm_90).
    """
    assert x.dim() == 2, x.shape
    if x.device.type == "cuda":
        from naiad_kernels.linear.quantised import kernel

        return kernel.quantize_tokens(x)
    return reference.quantize_tokens(x)
