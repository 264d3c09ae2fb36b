"""Quantised weights and activations in the layouts that the kernels read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

# Number of inputs whose codes are stored together. A word holds 8 of them: input 32 · step + 2 · word + half
# of a span is in the four bits at 4 · step + 16 · half, so one mask extracts two neighbours.
SPAN = 128
WORDS_PER_SPAN = 16
INPUTS_PER_STEP = 32
_FIRST_WITH_FP8 = (9, 0)
# Numbers of tokens that together, and with the most that a step has, launch every variant of the kernels.
DISTINCT_ROWS = (1, 17, 33, 65)


@dataclass(frozen=True, slots=True)
class W4Weight:
    """Four-bit codes in groups along the inputs: weight = (code − zero) · scale.

    Made by `repack_gptq`, `repack_awq` and `repack_nibbles`. Inputs are padded with codes 0 to whole spans.

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
        rounds_inputs: `linear` rounds its inputs to the dtype of the values, with a scale for each token;
            always so with FP8.
    """

    values: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor | None = None
    rounds_inputs: bool = False

    def __post_init__(self) -> None:
        """Check shapes and dtypes."""
        assert self.values.dtype in (torch.int8, torch.float8_e4m3fn), self.values.dtype
        assert self.values.is_contiguous()
        assert self.scales.shape == self.values.shape[:1], (self.scales.shape, self.values.shape)
        assert self.bias is None or self.bias.shape == self.scales.shape, self.bias.shape

    def part(self, outputs: range, inputs: range) -> ByteWeight:
        """Some outputs and inputs of a weight that has no bias yet."""
        assert self.bias is None, "the bias of a part depends on which inputs it has"
        rows = slice(outputs.start, outputs.stop)
        values = self.values[rows, inputs.start : inputs.stop].contiguous()
        return ByteWeight(values, self.scales[rows].clone(), rounds_inputs=self.rounds_inputs)

    @property
    def out_features(self) -> int:
        """Number of output features."""
        return self.values.shape[0]

    @property
    def in_features(self) -> int:
        """Number of input features."""
        return self.values.shape[1]

    def multiply(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """Compute `linear` for this layout."""
        from naiad_kernels.linear.quantised import quantize_tokens, w8a8_linear, w8a16_linear

        if self.values.dtype == torch.int8 and not self.rounds_inputs:
            return _with_residual(w8a16_linear(x, self), residual)
        tokens = quantize_tokens(x, self.values.dtype)
        return _with_residual(w8a8_linear(tokens, self, x.dtype), residual)

    @classmethod
    def joined(cls, parts: Sequence[ByteWeight]) -> ByteWeight:
        """One below the other, without biases; all have one dtype and round alike."""
        values, scales = (
            torch.cat([each.values for each in parts]),
            torch.cat([each.scales for each in parts]),
        )
        return cls(values, scales, rounds_inputs=parts[0].rounds_inputs)

    def matrix(self) -> torch.Tensor:
        """The weight that it stands for, float32."""
        return self.values.float() * self.scales.float()[:, None]


@dataclass(frozen=True, slots=True)
class ByteTokens:
    """Activations in eight bits with one scale for each token: x = value · scale.

    Attributes:
        values: `[num_tokens, dim]` int8 or float8_e4m3fn, contiguous.
        scales: `[num_tokens]` float32; NaN for a token with a value that is not finite.
    """

    values: torch.Tensor
    scales: torch.Tensor


def has_fp8(device: torch.device) -> bool:
    """Whether a device multiplies FP8: a GPU from sm_90 on, and a CPU, which converts it."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= _FIRST_WITH_FP8


def _with_residual(product: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    return product if residual is None else product.add_(residual)
