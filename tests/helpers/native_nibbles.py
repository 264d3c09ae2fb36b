"""Weights of four bits as the native kernels read them."""

from __future__ import annotations

import torch

from naiad_kernels.native.nibbles import NibbleWeight
from naiad_kernels.native.panels import NativeWeight


def with_zero_points(matrix: torch.Tensor) -> NibbleWeight:
    """Numbers, scales and zero points of any value that can be kept, between those of the matrix."""
    rounded = NibbleWeight.rounded(matrix)
    assert rounded is not None
    anything = torch.randint(-128, 128, rounded.offsets.shape, generator=_generator()).to(torch.int8)
    some = torch.rand(rounded.offsets.shape, generator=_generator()) < 0.2
    return NibbleWeight(rounded.numbers, rounded.scales, torch.where(some, anything, rounded.offsets))


def with_minimums(matrix: torch.Tensor) -> NibbleWeight:
    """The numbers and scales of a matrix, with minimums that have nothing to do with them."""
    rounded = NibbleWeight.rounded(matrix)
    assert rounded is not None
    minimums = torch.randn(rounded.offsets.shape, generator=_generator()).to(torch.float16)
    return NibbleWeight(rounded.numbers, rounded.scales, minimums)


def four_bits(matrix: torch.Tensor, bias: torch.Tensor | None) -> NativeWeight:
    """A weight in panels with zero points."""
    return NativeWeight.of_nibbles(with_zero_points(matrix), bias)


def four_bits_and_minimums(matrix: torch.Tensor, bias: torch.Tensor | None) -> NativeWeight:
    """A weight in panels with minimums."""
    return NativeWeight.of_nibbles(with_minimums(matrix), bias)


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)
