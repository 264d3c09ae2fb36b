"""Quantised weights and activations in the layouts that the kernels read."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Number of inputs whose codes are stored together. A word holds 8 of them: input 32 · step + 2 · word + half
# of a span is in the four bits at 4 · step + 16 · half, so one mask extracts two neighbours.
SPAN = 128
WORDS_PER_SPAN = 16
INPUTS_PER_STEP = 32


@dataclass(frozen=True, slots=True)
class W4Weight:
    """Four-bit codes in groups along the inputs: weight = (code − zero) · scale.

    Made by `repack_gptq` and `repack_awq`. Inputs are padded with codes 0 to whole spans.

    Attributes:
        words: `[num_spans, out_features, 16]` int32, see `SPAN`.
        scales: `[num_groups, out_features]`, floating dtype; groups of padding have scale 0.
        zeros: `[num_groups, out_features]` int16, 0 … 16.
        in_features: the layer's number of input features, without padding.
        group_size: number of inputs that share a scale and a zero: 32, 64 or a multiple of 128.
        input_order: `[in_features]` int64, the input that each stored row multiplies; None: in order.
        bias: `[out_features]`, floating dtype, or None.
    """

    words: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    in_features: int
    group_size: int
    input_order: torch.Tensor | None
    bias: torch.Tensor | None

    @property
    def out_features(self) -> int:
        """Number of output features."""
        return self.words.shape[1]

    def multiply(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """Compute `linear` for this layout."""
        from naiad_kernels.linear.quantised import w4a16_linear

        return _with_residual(w4a16_linear(x, self), residual)


@dataclass(frozen=True, slots=True)
class ByteWeight:
    """One byte for each weight and one scale for each output: weight = value · scale.

    Attributes:
        values: `[out_features, in_features]` int8 or float8_e4m3fn, contiguous.
        scales: `[out_features]`, floating dtype.
        bias: `[out_features]`, floating dtype, or None.
    """

    values: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor | None = None

    def __post_init__(self) -> None:
        """Check shapes and dtypes."""
        assert self.values.dtype in (torch.int8, torch.float8_e4m3fn), self.values.dtype
        assert self.values.is_contiguous()
        assert self.scales.shape == self.values.shape[:1], (self.scales.shape, self.values.shape)
        assert self.bias is None or self.bias.shape == self.scales.shape, self.bias.shape

    @property
    def out_features(self) -> int:
        """Number of output features."""
        return self.values.shape[0]

    @property
    def in_features(self) -> int:
        """Number of input features."""
        return self.values.shape[1]

    def multiply(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """Compute `linear` for this layout; with FP8 weights, tokens are quantized to FP8 first."""
        from naiad_kernels.linear.quantised import fp8_linear, quantize_tokens, w8a16_linear

        if self.values.dtype == torch.int8:
            return _with_residual(w8a16_linear(x, self), residual)
        return _with_residual(fp8_linear(quantize_tokens(x), self, x.dtype), residual)


@dataclass(frozen=True, slots=True)
class FP8Tokens:
    """Activations in FP8 with one scale for each token: x = value · scale.

    Attributes:
        values: `[num_tokens, dim]` float8_e4m3fn, contiguous.
        scales: `[num_tokens]` float32; NaN for a token with a value that is not finite.
    """

    values: torch.Tensor
    scales: torch.Tensor


def _with_residual(product: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    return product if residual is None else product.add_(residual)
