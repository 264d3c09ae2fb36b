"""Quantised weights and activations in the layouts that the kernels read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

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
    """Four-bit codes in groups along the inputs: weight = (code − zero) · scale, or floats with exponents.

    Made by the functions of `repack`. Inputs are padded with codes 0 to whole spans.

    Attributes:
        words: `[num_spans, out_features, 16]` int32, see `SPAN`.
        scales: `[num_groups, out_features]` float16; groups of padding have scale 0. Without zeros uint8:
            weight = value of the code in e2m1 · 2^(scale − 127).
        zeros: `[num_groups, out_features]` int16, 0 … 16, or None.
        in_features: the layer's number of input features, without padding.
        group_size: number of inputs that share a scale and a zero: 32, 64, 128, or all with their padding;
            without zeros 32. The kernels would read groups of any multiple of 128.
        input_order: `[in_features]` int64, the input that each stored row multiplies; None: in order.
        bias: `[out_features]`, floating dtype, or None.
    """

    words: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
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
    """One byte for each weight, and scales of outputs or of their groups of inputs: weight = value · scale.

    Attributes:
        values: `[out_features, in_features]` int8 or float8_e4m3fn, contiguous.
        scales: `[out_features]`, or `[num_groups, out_features]` if there are groups; floating dtype,
            contiguous.
        bias: `[out_features]`, floating dtype, or None.
        rounds_inputs: `linear` rounds its inputs to the dtype of the values, with a scale for each token, or
            for each `SPAN` inputs of it if there are groups; always so with FP8.
        group_size: number of inputs that share a scale, a multiple of `SPAN`, with FP8 only; None: there are
            no groups. The last group may have fewer.
    """

    values: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor | None = None
    rounds_inputs: bool = False
    group_size: int | None = None

    def __post_init__(self) -> None:
        """Check shapes and dtypes."""
        assert self.values.dtype in (torch.int8, torch.float8_e4m3fn), self.values.dtype
        assert self.values.is_contiguous()
        assert self.bias is None or self.bias.shape == self.values.shape[:1], self.bias.shape
        assert self.scales.is_contiguous()
        shape = self.values.shape[:1]
        if self.group_size is not None:
            assert self.group_size % SPAN == 0, self.group_size
            assert self.values.dtype == torch.float8_e4m3fn, self.values.dtype
            shape = torch.Size([-(-self.in_features // self.group_size), self.out_features])
        assert self.scales.shape == shape, (self.scales.shape, shape)

    def part(self, outputs: range, inputs: range) -> ByteWeight | None:
        """Some outputs and inputs of a weight that has no bias yet; None: they begin within a group."""
        assert self.bias is None, "the bias of a part depends on which inputs it has"
        rows = slice(outputs.start, outputs.stop)
        values = self.values[rows, inputs.start : inputs.stop].contiguous()
        if self.group_size is None:
            return replace(self, values=values, scales=self.scales[rows].clone())
        if inputs.start % self.group_size:
            return None
        groups = slice(inputs.start // self.group_size, -(-inputs.stop // self.group_size))
        return replace(self, values=values, scales=self.scales[groups, rows].clone())

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
        tokens = quantize_tokens(x, self.values.dtype, by_span=self.group_size is not None)
        return _with_residual(w8a8_linear(tokens, self, x.dtype), residual)

    @classmethod
    def joined(cls, parts: Sequence[ByteWeight]) -> ByteWeight | None:
        """One below the other, without biases; None: dtypes, rounding or groups differ."""
        first = parts[0]
        if len({(each.values.dtype, each.rounds_inputs, each.group_size) for each in parts}) > 1:
            return None
        values = torch.cat([each.values for each in parts])
        return replace(first, values=values, scales=torch.cat([each.scales for each in parts], dim=-1))

    def matrix(self) -> torch.Tensor:
        """The weight that it stands for, float32."""
        if self.group_size is None:
            return self.values.float() * self.scales.float()[:, None]
        scales = self.scales.float().repeat_interleave(self.group_size, 0)[: self.in_features]
        return self.values.float() * scales.T


@dataclass(frozen=True, slots=True)
class ByteTokens:
    """Activations in eight bits with scales of tokens or of their spans of inputs: x = value · scale.

    Attributes:
        values: `[num_tokens, dim]` int8 or float8_e4m3fn, contiguous.
        scales: `[num_tokens]`, or `[num_spans, num_tokens]` for each `SPAN` inputs, the last of which may be
            fewer; float32, contiguous. NaN where a value is not finite.
    """

    values: torch.Tensor
    scales: torch.Tensor


def has_fp8(device: torch.device) -> bool:
    """Whether a device multiplies FP8: a GPU from sm_90 on, and a CPU, which converts it."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= _FIRST_WITH_FP8


def _with_residual(product: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    return product if residual is None else product.add_(residual)
