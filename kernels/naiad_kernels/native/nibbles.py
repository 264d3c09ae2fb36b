"""Weights as numbers of four bits, in groups of 32 inputs that share a scale and an offset."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

GROUP_INPUTS = 32
# Two groups: the inputs that are rounded together.
_STEP_INPUTS = 64
_LARGEST = 15
# Zero points are kept as how many eighths they are above this one, in eight bits.
_MIDDLE = 8
_PER_UNIT = 8
# A matrix is converted in parts of as many rows, to need little memory. They are whole panels.
PART_ROWS = 1024


@dataclass(frozen=True, slots=True)
class NibbleWeight:
    """A weight of four bits: scale · (number − zero point), or scale · number + minimum.

    Attributes:
        numbers: `[out_features, in_features]` uint8, 0 … 15.
        scales: `[out_features, groups]` float16; group i has the inputs from 32 · i on.
        offsets: `[out_features, groups]`: int8, eight times what a zero point has more than 8; or float16,
            the minimums.
    """

    numbers: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor

    @property
    def has_minimums(self) -> bool:
        """Whether the offsets are minimums."""
        return self.offsets.dtype == torch.float16

    @classmethod
    def rounded(cls, matrix: torch.Tensor, has_whole_zeros: bool = False) -> NibbleWeight | None:
        """Round a weight to the nearest numbers, with zero points.

        Args:
            matrix: `[out_features, in_features]`, a floating dtype; the result is on its device.
            has_whole_zeros: zero points are whole numbers, 0 … 15.

        Returns:
            None: a scale is beyond what float16 holds.
        """
        zeros_per_unit = 1 if has_whole_zeros else _PER_UNIT
        parts = [_round(part.float(), zeros_per_unit) for part in torch.split(matrix, PART_ROWS)]
        whole = cls.joined(parts)
        return whole if bool(whole.scales.isfinite().all()) else None

    @classmethod
    def aligned(cls, matrix: torch.Tensor) -> NibbleWeight | None:
        """Find the numbers and minimums that a weight was made of.

        A weight that was dequantised from Q4_1 and rounded to 16 bits has in each group only 16 values, which
        are evenly spaced.

        Args:
            matrix: `[out_features, in_features]`, a floating dtype, on the CPU.

        Returns:
            None: the weight was not made so.
        """
        parts = []
        for part in torch.split(matrix, PART_ROWS):
            found = _find_numbers(part.float())
            if found is None:
                return None
            parts.append(found)
        return cls.joined(parts)

    @classmethod
    def of_zero_points(
        cls, numbers: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor
    ) -> NibbleWeight | None:
        """Keep numbers that a checkpoint has.

        Args:
            numbers: `[out_features, in_features]`, whole numbers from 0 to 15.
            scales: `[out_features, groups]` float32, of groups of as many inputs each: a multiple of 32, or
                all.
            zeros: as the scales.

        Returns:
            None: a scale or zero point cannot be kept exactly, or the groups are no whole groups of 32.
        """
        offsets = (zeros - _MIDDLE) * _PER_UNIT
        kept, halves = offsets.to(torch.int8), scales.to(torch.float16)
        if not torch.equal(kept.float(), offsets) or not torch.equal(halves.float(), scales):
            return None
        return cls._of_groups(numbers, halves, kept)

    @classmethod
    def of_minimums(
        cls, numbers: torch.Tensor, scales: torch.Tensor, minimums: torch.Tensor
    ) -> NibbleWeight | None:
        """Keep numbers that a checkpoint has; scales and minimums in float16, else as `of_zero_points`."""
        return cls._of_groups(numbers, scales, minimums)

    @classmethod
    def joined(cls, parts: Sequence[NibbleWeight]) -> NibbleWeight:
        """One below the other; all have zero points, or all have minimums."""
        assert len({each.has_minimums for each in parts}) == 1, "zero points beside minimums"
        return cls(
            torch.cat([each.numbers for each in parts]),
            torch.cat([each.scales for each in parts]),
            torch.cat([each.offsets for each in parts]),
        )

    def part(self, outputs: range, inputs: range) -> NibbleWeight | None:
        """Some outputs and inputs of the weight; None: a group would be cut at its beginning."""
        if inputs.start % GROUP_INPUTS:
            return None
        groups = slice(inputs.start // GROUP_INPUTS, -(-inputs.stop // GROUP_INPUTS))
        rows = slice(outputs.start, outputs.stop)
        return NibbleWeight(
            self.numbers[rows, inputs.start : inputs.stop].contiguous(),
            self.scales[rows, groups].contiguous(),
            self.offsets[rows, groups].contiguous(),
        )

    @classmethod
    def _of_groups(
        cls, numbers: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor
    ) -> NibbleWeight | None:
        num_inputs, num_groups = numbers.shape[1], scales.shape[1]
        size = num_inputs // num_groups
        if num_inputs % num_groups or (num_groups > 1 and size % GROUP_INPUTS):
            return None
        repeats = size // GROUP_INPUTS if num_groups > 1 else -(-num_inputs // GROUP_INPUTS)
        return cls(
            numbers.to(torch.uint8),
            scales.repeat_interleave(repeats, 1),
            offsets.repeat_interleave(repeats, 1),
        )

    def zero_points(self) -> torch.Tensor | None:
        """The numbers that stand for 0, `[out_features, groups]` float32; None if there are minimums."""
        return None if self.has_minimums else self.offsets.float() / _PER_UNIT + _MIDDLE

    def matrix(self) -> torch.Tensor:
        """The weight that it stands for, float32."""
        num_inputs = self.numbers.shape[1]
        scales, offsets = (
            each.float().repeat_interleave(GROUP_INPUTS, 1)[:, :num_inputs]
            for each in (self.scales, self.offsets)
        )
        if self.has_minimums:
            return self.numbers * scales + offsets
        return (self.numbers - (offsets / _PER_UNIT + _MIDDLE)) * scales

    def panels(self, lanes: int) -> torch.Tensor:
        """Lay the weight out as `src/nibbles.h` reads it.

        Args:
            lanes: outputs of a panel.

        Returns:
            `[panels, steps, bytes of a step]`, uint8; the last panel is filled with zeros.
        """
        assert PART_ROWS % lanes == 0, lanes
        whole = (self.numbers, self.scales, self.offsets)
        parts = zip(*(torch.split(each, PART_ROWS) for each in whole), strict=True)
        return torch.cat([NibbleWeight(*part)._panels(lanes) for part in parts])

    def _panels(self, lanes: int) -> torch.Tensor:
        """Lay out as many panels as the outputs fill."""
        num_panels = -(-len(self.numbers) // lanes)
        num_steps = -(-self.numbers.shape[1] // _STEP_INPUTS)
        shape = (num_panels, lanes, num_steps)
        numbers = _filled(self.numbers, num_panels * lanes, num_steps * _STEP_INPUTS)
        # A group is two halves of four times four inputs.
        fours = numbers.view(*shape, _STEP_INPUTS // GROUP_INPUTS, 2, 4, 4)
        both = fours[:, :, :, :, 0] | fours[:, :, :, :, 1] << 4
        parts = [both.permute(0, 2, 3, 4, 1, 5).flatten(2)]
        for each in (self.scales, self.offsets):
            groups = _filled(each, num_panels * lanes, num_steps * _STEP_INPUTS // GROUP_INPUTS)
            by_step = groups.view(*shape, -1).permute(0, 2, 3, 1).flatten(2).contiguous()
            parts.append(by_step.view(torch.uint8))
        return torch.cat(parts, 2)


def _round(matrix: torch.Tensor, zeros_per_unit: int) -> NibbleWeight:
    """Scales reach from the least weight of a group, or 0, to the greatest, or 0."""
    groups = _groups_of(matrix)
    least, greatest = groups.amin(2).clamp_max(0), groups.amax(2).clamp_min(0)
    scales = ((greatest - least) / _LARGEST).to(torch.float16)
    steps = torch.where(scales > 0, scales.float(), 1.0)
    rounded_zeros = ((-least / steps - _MIDDLE) * zeros_per_unit).round_()
    # A scale that float16 holds coarsely may put zero beyond the numbers.
    most = 127 if zeros_per_unit > 1 else (_LARGEST - _MIDDLE) * _PER_UNIT
    offsets = (rounded_zeros * (_PER_UNIT // zeros_per_unit)).clamp_(-128, most)
    zeros = offsets / _PER_UNIT + _MIDDLE
    numbers = (groups / steps[:, :, None] + zeros[:, :, None]).round_().clamp_(0, _LARGEST)
    return NibbleWeight(_as_numbers(numbers, matrix.shape[1]), scales, offsets.to(torch.int8))


def _find_numbers(matrix: torch.Tensor) -> NibbleWeight | None:
    """None if a weight is more than an eighth of a step beside what is found."""
    groups = _groups_of(matrix)
    minimums = groups.amin(2).to(torch.float16)
    scales = ((groups.amax(2) - groups.amin(2)) / _LARGEST).to(torch.float16)
    least, steps = (each.float()[:, :, None] for each in (minimums, scales))
    places = (groups - least) / torch.where(steps > 0, steps, 1.0)
    numbers = places.round().clamp_(0, _LARGEST)
    is_constant = groups.amin(2) == groups.amax(2)
    if not bool(((places - numbers).abs() <= 1 / 8).all() and ((scales > 0) | is_constant).all()):
        return None
    return NibbleWeight(_as_numbers(numbers, matrix.shape[1]), scales, minimums)


def _groups_of(matrix: torch.Tensor) -> torch.Tensor:
    """`[out_features, groups, 32]`; the last group is filled with its row's last weight."""
    missing = -matrix.shape[1] % GROUP_INPUTS
    if missing:
        matrix = F.pad(matrix, (0, missing), mode="replicate")
    return matrix.view(len(matrix), -1, GROUP_INPUTS)


def _as_numbers(groups: torch.Tensor, num_inputs: int) -> torch.Tensor:
    return groups.flatten(1)[:, :num_inputs].to(torch.uint8)


def _filled(values: torch.Tensor, num_rows: int, num_columns: int) -> torch.Tensor:
    """With zeros up to so many rows and columns."""
    return F.pad(values, (0, num_columns - values.shape[1], 0, num_rows - len(values)))
