"""Four-bit layers in the formats of GPTQ, AWQ and MXFP4, packed here bit by bit, and eight-bit ones."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from naiad_kernels.linear.quantised import ByteWeight, Int4Tensors, MXFP4Weight

# AutoAWQ's order: nibble i of a word holds the i-th of these of eight neighbouring columns.
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Int4Layer:
    """codes `[in, out]`, zeros `[groups, out]`, scales `[groups, out]`, the group of each input."""

    codes: torch.Tensor
    zeros: torch.Tensor
    scales: torch.Tensor
    groups: torch.Tensor
    group_size: int
    bias: torch.Tensor | None = None

    def matrix(self) -> torch.Tensor:
        """The weights, `[in, out]` float32, by the definition of both formats."""
        zeros, scales = self.zeros[self.groups], self.scales.float()[self.groups]
        return (self.codes - zeros) * scales

    def as_gptq(self, zero_offset: int = 1) -> Int4Tensors:
        return Int4Tensors(
            qweight=pack_columns(self.codes.T, range(8)).T.contiguous(),
            qzeros=pack_columns(self.zeros - zero_offset, range(8)),
            scales=self.scales,
            g_idx=self.groups.to(torch.int32),
            bias=self.bias,
        )

    def as_awq(self) -> Int4Tensors:
        return Int4Tensors(
            qweight=pack_columns(self.codes, AWQ_COLUMNS),
            qzeros=pack_columns(self.zeros, AWQ_COLUMNS),
            scales=self.scales,
            bias=self.bias,
        )

    def shuffled(self) -> Int4Layer:
        """The same codes with the groups' inputs in another order, as with act-order."""
        return replace(self, groups=self.groups[torch.randperm(len(self.groups))])


def int4_layer(in_features: int, out_features: int, group_size: int, has_bias: bool = False) -> Int4Layer:
    size = in_features if group_size == -1 else group_size
    num_groups = -(-in_features // size)
    return Int4Layer(
        codes=torch.randint(0, 16, (in_features, out_features)),
        zeros=torch.randint(1, 16, (num_groups, out_features)),
        scales=(torch.rand(num_groups, out_features) / 8 + 0.01).half(),
        groups=torch.arange(in_features) // size,
        group_size=group_size,
        bias=torch.randn(out_features).half() if has_bias else None,
    )


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


def pack_columns(codes: torch.Tensor, columns: range | tuple[int, ...]) -> torch.Tensor:
    """Pack `[rows, out]` to int32 `[rows, out / 8]`: nibble i of a word is `columns[i]` of its eight."""
    rows = []
    for row in codes.tolist():
        words = []
        for first in range(0, len(row), 8):
            word = sum(row[first + column] << (4 * nibble) for nibble, column in enumerate(columns))
            words.append(word - 2**32 if word >= 2**31 else word)
        rows.append(words)
    return torch.tensor(rows, dtype=torch.int32)
