"""Layers in four bits, as the readers of checkpoints keep them and as they are packed, and in eight."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from naiad_kernels.linear.quantised import (
    ByteWeight,
    MXFP4Weight,
    ReorderedNibbles,
    W4Weight,
    repack_nibbles,
    repack_reordered,
)
from naiad_kernels.linear.quantised.rounded import round_weight
from naiad_kernels.native.nibbles import GROUP_INPUTS, NibbleWeight

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Int4Layer:
    """numbers `[out, in]`, scales and zeros `[out, groups]` float32, the group of each input."""

    numbers: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    group_ids: torch.Tensor
    bias: torch.Tensor | None = None

    def matrix(self) -> torch.Tensor:
        """The weights, `[out, in]` float32, by the definition of GPTQ and AWQ."""
        return (self.numbers - self.zeros[:, self.group_ids]) * self.scales[:, self.group_ids]

    def shuffled(self, order: torch.Tensor) -> Int4Layer:
        """The same numbers with the groups' inputs in another order, as with act-order."""
        return replace(self, group_ids=self.group_ids[order])

    def kept(self) -> NibbleWeight:
        """As a reader keeps it; unequal groups become groups of 32 inputs."""
        sizes, scales, zeros = self.group_ids.bincount(), self.scales, self.zeros
        if bool((sizes != sizes[0]).any()):
            of_each_32 = self.group_ids[::GROUP_INPUTS]
            scales, zeros = scales[:, of_each_32], zeros[:, of_each_32]
        kept = NibbleWeight.of_zero_points(self.numbers, scales, zeros)
        assert kept is not None
        return kept

    def reordered(self) -> ReorderedNibbles:
        """As a reader keeps it if it is shuffled; all groups are equally many inputs."""
        kept = ReorderedNibbles.of_groups(self.numbers, self.scales, self.zeros, self.group_ids)
        assert kept is not None
        return kept

    def packed(self) -> W4Weight:
        """For the kernels, by way of what a reader keeps."""
        if bool((self.group_ids.diff() < 0).any()):
            weight = repack_reordered(self.reordered(), self.bias, CPU)
        else:
            weight = repack_nibbles(self.kept(), self.bias, CPU)
        assert weight is not None
        return weight


def int4_layer(in_features: int, out_features: int, group_size: int, has_bias: bool = False) -> Int4Layer:
    """In groups of a multiple of 32 inputs, of which the last may be smaller; −1: one group of any size."""
    size = in_features if group_size == -1 else group_size
    shape = (out_features, -(-in_features // size))
    return Int4Layer(
        numbers=torch.randint(0, 16, (out_features, in_features), dtype=torch.uint8),
        scales=(torch.rand(shape) / 8 + 0.01).half().float(),
        zeros=torch.randint(0, 17, shape).float(),
        group_ids=torch.arange(in_features) // size,
        bias=torch.randn(out_features).half() if has_bias else None,
    )


def rounded_layer(in_features: int, out_features: int) -> W4Weight:
    """In groups of 32 inputs, of which the last may have any number."""
    weight = round_weight(torch.randn(out_features, in_features), torch.randn(out_features).half(), "int4")
    assert isinstance(weight, W4Weight)
    assert weight.group_size == GROUP_INPUTS
    return weight


def int8_layer(in_features: int, out_features: int, has_bias: bool = False) -> ByteWeight:
    values = torch.randint(-128, 128, (out_features, in_features), dtype=torch.int8)
    bias = torch.randn(out_features).half() if has_bias else None
    return ByteWeight(values, torch.rand(out_features).half() / 100 + 0.001, bias)


def fp8_layer(in_features: int, out_features: int, has_bias: bool = False) -> ByteWeight:
    values = torch.randn(out_features, in_features).mul(50).clamp(-448, 448).to(torch.float8_e4m3fn)
    bias = torch.randn(out_features).half() if has_bias else None
    return ByteWeight(values, torch.rand(out_features) / 50 + 0.001, bias)


def fp8_groups_layer(
    in_features: int, out_features: int, has_bias: bool = False, group_size: int = 128
) -> ByteWeight:
    """Scales that differ between groups of inputs by up to a thousand."""
    plain = fp8_layer(in_features, out_features, has_bias)
    scales = 10 ** (torch.rand(-(-in_features // group_size), out_features) * 3 - 4)
    return replace(plain, scales=scales, group_size=group_size)


def mxfp4_layer(in_features: int, out_features: int, exponents: range = range(119, 131)) -> MXFP4Weight:
    shape = (out_features, in_features // 2)
    return MXFP4Weight(
        torch.randint(0, 256, shape, dtype=torch.uint8),
        torch.randint(exponents.start, exponents.stop, (out_features, in_features // 32), dtype=torch.uint8),
    )


def e2m1(code: int) -> float:
    """The float of a code: a sign, two bits of an exponent, and one of a mantissa."""
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    magnitude = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2 ** (exponent - 1)
    return -magnitude if sign else magnitude
