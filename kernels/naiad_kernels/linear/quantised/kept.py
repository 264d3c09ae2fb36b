"""Weights of four bits in the forms in which checkpoints' readers keep them for the kernels of a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from naiad_kernels.linear.quantised.weights import ByteWeight
from naiad_kernels.native.nibbles import NibbleWeight

# The inputs of an output that share an exponent, and what an exponent is stored with more than it is.
EXPONENT_INPUTS = 32
EXPONENT_BIAS = 127
# 6, the largest float, times the power of two of a larger exponent is beyond float32.
_LARGEST_EXPONENT = 252
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# The float of each code of four bits.
E2M1 = torch.tensor([*_MAGNITUDES, *(-each for each in _MAGNITUDES)])


@dataclass(frozen=True, slots=True)
class MXFP4Weight:
    """Floats of four bits with an exponent for each 32 inputs: weight = e2m1 · 2^(exponent − 127).

    Attributes:
        numbers: `[out_features, in_features / 2]` uint8, the first of two in the lower half.
        exponents: `[out_features, in_features / 32]` uint8.
    """

    numbers: torch.Tensor
    exponents: torch.Tensor

    @classmethod
    def of_codes(cls, codes: torch.Tensor, exponents: torch.Tensor) -> MXFP4Weight | None:
        """Keep codes that a checkpoint has.

        Args:
            codes: `[out_features, in_features]` uint8, 0 … 15.
            exponents: `[out_features, in_features / 32]` uint8.

        Returns:
            None: a weight may be beyond float32.
        """
        if bool((exponents > _LARGEST_EXPONENT).any()):
            return None
        return cls(codes[:, ::2] | codes[:, 1::2] << 4, exponents.clone())

    def codes(self) -> torch.Tensor:
        """One code a byte: `[out_features, in_features]` uint8."""
        return torch.stack((self.numbers & 15, self.numbers >> 4), dim=-1).flatten(1)

    def matrix(self) -> torch.Tensor:
        """The weight that it stands for, float32."""
        values = E2M1[self.codes().long()].view(*self.exponents.shape, EXPONENT_INPUTS)
        return torch.ldexp(values, self.exponents[:, :, None].int() - EXPONENT_BIAS).flatten(1)

    def part(self, outputs: range, inputs: range) -> MXFP4Weight | None:
        """Some outputs and inputs of the weight; None: a group of 32 inputs would be cut."""
        if inputs.start % EXPONENT_INPUTS or inputs.stop % EXPONENT_INPUTS:
            return None
        rows = slice(outputs.start, outputs.stop)
        pairs, groups = (slice(inputs.start // size, inputs.stop // size) for size in (2, EXPONENT_INPUTS))
        return MXFP4Weight(self.numbers[rows, pairs].contiguous(), self.exponents[rows, groups].contiguous())

    @classmethod
    def joined(cls, parts: Sequence[MXFP4Weight]) -> MXFP4Weight:
        """One below the other."""
        return cls(torch.cat([each.numbers for each in parts]), torch.cat([each.exponents for each in parts]))


@dataclass(frozen=True, slots=True)
class ReorderedNibbles:
    """Numbers of four bits whose inputs are sorted by group, as the kernels want those of act-order.

    Attributes:
        nibbles: the numbers, with zero points.
        input_order: `[in_features]` int64, the input that each column of the numbers multiplies.
    """

    nibbles: NibbleWeight
    input_order: torch.Tensor

    @classmethod
    def of_groups(
        cls, numbers: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, group_ids: torch.Tensor
    ) -> ReorderedNibbles | None:
        """Sort the inputs of a weight by their groups.

        Args:
            numbers: `[out_features, in_features]`, whole numbers from 0 to 15.
            scales: `[out_features, groups]` float32.
            zeros: as the scales.
            group_ids: `[in_features]` int64, the group of each input.

        Returns:
            None: groups are not equally many inputs, or `NibbleWeight.of_zero_points` cannot keep them.
        """
        counts = group_ids.bincount(minlength=scales.shape[1])
        if bool((counts != counts[0]).any()):
            return None
        order = group_ids.argsort(stable=True)
        nibbles = NibbleWeight.of_zero_points(numbers[:, order], scales, zeros)
        return None if nibbles is None else cls(nibbles, order)

    def matrix(self) -> torch.Tensor:
        """The weight that it stands for, float32."""
        return self.nibbles.matrix()[:, self.input_order.argsort()]

    def part(self, outputs: range, inputs: range) -> ReorderedNibbles | None:
        """Some outputs of the weight; None: only some inputs, which have parts of many groups."""
        if inputs != range(len(self.input_order)):
            return None
        nibbles = self.nibbles.part(outputs, inputs)
        return None if nibbles is None else ReorderedNibbles(nibbles, self.input_order)

    @classmethod
    def joined(cls, parts: Sequence[ReorderedNibbles]) -> ReorderedNibbles | None:
        """One below the other; None: their orders differ."""
        first = parts[0]
        if not all(torch.equal(each.input_order, first.input_order) for each in parts):
            return None
        return cls(NibbleWeight.joined([each.nibbles for each in parts]), first.input_order)


# What only the kernels for a GPU multiply by; native kernels multiply by `NibbleWeight` too.
GPUForm = ByteWeight | MXFP4Weight | ReorderedNibbles
KeptWeight = NibbleWeight | GPUForm
_Form = TypeVar("_Form", NibbleWeight, ByteWeight, MXFP4Weight, ReorderedNibbles)


def joined_kept(parts: Sequence[torch.Tensor | KeptWeight]) -> KeptWeight | None:
    """Weights one below the other; None: they are not all kept in one form."""
    if nibbles := _all_of(NibbleWeight, parts):
        has_one_kind = len({each.has_minimums for each in nibbles}) == 1
        return NibbleWeight.joined(nibbles) if has_one_kind else None
    if octets := _all_of(ByteWeight, parts):
        return ByteWeight.joined(octets)
    if floats := _all_of(MXFP4Weight, parts):
        return MXFP4Weight.joined(floats)
    if reordered := _all_of(ReorderedNibbles, parts):
        return ReorderedNibbles.joined(reordered)
    return None


def _all_of(form: type[_Form], parts: Sequence[torch.Tensor | KeptWeight]) -> list[_Form]:
    """The parts, if all have this form; else none."""
    found = [each for each in parts if isinstance(each, form)]
    return found if len(found) == len(parts) else []
