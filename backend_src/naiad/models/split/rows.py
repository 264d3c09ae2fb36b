"""`RowsPart`: one rank's part of a quantised weight."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from naiad.models.quantised import WeightRows
from naiad_kernels.linear.quantised.kept import GPUForm
from naiad_kernels.native.nibbles import NibbleWeight


@dataclass(frozen=True, slots=True)
class RowsPart:
    """A `WeightRows` of some outputs and inputs of another.

    Its weights are exactly those of the whole, whatever groups of inputs they are stored in. Numbers of four
    bits stay such only where the part begins with a group of 32 inputs, bytes where it begins with a group.

    Attributes:
        whole: the whole weight.
        outputs, inputs: the part.
    """

    whole: WeightRows
    outputs: range
    inputs: range

    @property
    def place(self) -> str:
        """File and tensor; see `WeightRows`."""
        return self.whole.place

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of outputs and inputs; see `WeightRows`."""
        return len(self.outputs), len(self.inputs)

    def rows(self, first: int, last: int) -> torch.Tensor:
        """Compute rows; see `WeightRows`."""
        rows = self.whole.rows(self.outputs.start + first, self.outputs.start + last)
        return rows[:, self.inputs.start : self.inputs.stop]

    def nibbles(self) -> NibbleWeight | None:
        """Keep the numbers; see `WeightRows`."""
        whole = self.whole.nibbles()
        return None if whole is None else whole.part(self.outputs, self.inputs)

    def gpu_form(self) -> GPUForm | None:
        """Copy what is stored; see `WeightRows`."""
        whole = self.whole.gpu_form()
        return None if whole is None else whole.part(self.outputs, self.inputs)
