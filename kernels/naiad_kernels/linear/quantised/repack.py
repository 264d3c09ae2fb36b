"""Converts numbers of four bits to the layout of `W4Weight`, once, at load."""

from __future__ import annotations

from dataclasses import replace

import torch

from naiad_kernels.linear.quantised.kept import EXPONENT_INPUTS, MXFP4Weight, ReorderedNibbles
from naiad_kernels.linear.quantised.weights import INPUTS_PER_STEP, SPAN, WORDS_PER_SPAN, W4Weight
from naiad_kernels.native.nibbles import GROUP_INPUTS, NibbleWeight

_LARGEST_ZERO = 16


def repack_nibbles(weight: NibbleWeight, bias: torch.Tensor | None, device: torch.device) -> W4Weight | None:
    """Convert numbers that a checkpoint's reader has kept, or that a weight was rounded to.

    Args:
        weight: on the CPU or on `device`.
        bias: `[out_features]` on `device`, or None.
        device: where the result lies.

    Returns:
        None: the weight has minimums, or a zero point that is no whole number in 0 … 16.
    """
    zeros = weight.zero_points()
    if zeros is None or bool(((zeros < 0) | (zeros > _LARGEST_ZERO) | (zeros != zeros.round())).any()):
        return None
    in_features = weight.numbers.shape[1]
    per_group, group_size = _joined_groups(weight.scales, zeros, in_features)
    scales, zeros = (each[:, ::per_group].T.contiguous().to(device) for each in (weight.scales, zeros))
    codes = weight.numbers.to(device).T
    return _pack(codes, zeros.to(torch.int16), scales, bias, group_size)


def repack_reordered(
    weight: ReorderedNibbles, bias: torch.Tensor | None, device: torch.device
) -> W4Weight | None:
    """Convert numbers whose inputs are sorted by group; as `repack_nibbles`."""
    packed = repack_nibbles(weight.nibbles, bias, device)
    return None if packed is None else replace(packed, input_order=weight.input_order.to(device))


def repack_mxfp4(weight: MXFP4Weight, bias: torch.Tensor | None, device: torch.device) -> W4Weight:
    """Convert floats of four bits with exponents.

    Args:
        weight: on the CPU.
        bias: `[out_features]` on `device`, or None.
        device: where the result lies.
    """
    codes, exponents = weight.codes().to(device).T, weight.exponents.to(device).T
    return _pack(codes, None, exponents, bias, EXPONENT_INPUTS)


def _joined_groups(
    scales: torch.Tensor,  # [out_features, num_groups]
    zeros: torch.Tensor,
    in_features: int,
) -> tuple[int, int]:
    """How many groups of 32 inputs can be one, because they share scale and zero; and their inputs."""
    places = torch.arange(scales.shape[1])
    whole = -(-in_features // SPAN) * SPAN
    for group_size in (whole, SPAN, SPAN // 2):
        first = places - places % (group_size // GROUP_INPUTS)
        if torch.equal(scales, scales[:, first]) and torch.equal(zeros, zeros[:, first]):
            return group_size // GROUP_INPUTS, group_size
    return 1, GROUP_INPUTS


def _pack(
    codes: torch.Tensor,  # [in_features, out_features] uint8
    zeros: torch.Tensor | None,  # [num_groups, out_features] int16
    scales: torch.Tensor,  # [num_groups, out_features]
    bias: torch.Tensor | None,
    group_size: int,
) -> W4Weight:
    in_features, out_features = codes.shape
    num_spans = -(-in_features // SPAN)
    padded = torch.nn.functional.pad(codes, (0, 0, 0, num_spans * SPAN - in_features))
    steps = SPAN // INPUTS_PER_STEP
    placed = padded.view(num_spans, steps, WORDS_PER_SPAN, 2, out_features)
    words = torch.zeros(num_spans, WORDS_PER_SPAN, out_features, dtype=torch.int32, device=codes.device)
    for step in range(steps):
        for half in range(2):
            words |= placed[:, step, :, half].to(torch.int32) << (4 * step + 16 * half)
    padding = (0, 0, 0, num_spans * SPAN // group_size - len(scales))
    scales = torch.nn.functional.pad(scales, padding).contiguous()
    zeros = None if zeros is None else torch.nn.functional.pad(zeros, padding).contiguous()
    return W4Weight(words.transpose(1, 2).contiguous(), scales, zeros, in_features, group_size, None, bias)
