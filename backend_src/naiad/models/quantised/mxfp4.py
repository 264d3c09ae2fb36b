"""MXFP4: floats of four bits, two a byte along the inputs, with an exponent for each 32 inputs.

    numbers    uint8 [N, K / 2], the first of two in the lower half
    exponents  uint8 [N, K / 32], 127 more than the power of two

compressed-tensors calls them weight_packed and weight_scale. gpt-oss has `…_blocks` [E, N, K / 32, 16] and
`…_scales` [E, N, K / 32] with the same bytes in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from naiad.errors import ModelError
from naiad.models.quantised.stored import LayerTensors
from naiad_kernels.linear.quantised.kept import EXPONENT_INPUTS, GPUForm, MXFP4Weight
from naiad_kernels.native.nibbles import NibbleWeight

_NAN = 255


@dataclass(frozen=True, slots=True)
class MXFP4Rows:
    """A `WeightRows` of MXFP4.

    Attributes:
        place, shape: as `WeightRows` has them.
        numbers: `[out, in / 2]`, uint8.
        exponents: `[out, in / 32]`, uint8.
    """

    place: str
    shape: tuple[int, int]
    numbers: torch.Tensor
    exponents: torch.Tensor

    def rows(self, first: int, last: int) -> torch.Tensor:
        """Compute rows; see `WeightRows`."""
        return self._stored(first, last).matrix()

    def nibbles(self) -> NibbleWeight | None:
        """None: floats are not evenly spaced; see `WeightRows`."""
        return None

    def gpu_form(self) -> GPUForm | None:
        """Copy codes and exponents; see `WeightRows`."""
        whole = self._stored(0, self.shape[0])
        return MXFP4Weight.of_codes(whole.codes(), whole.exponents)

    def _stored(self, first: int, last: int) -> MXFP4Weight:
        return MXFP4Weight(self.numbers[first:last], self.exponents[first:last])


def open_mxfp4(stored: LayerTensors) -> MXFP4Rows:
    """Take a layer's tensors.

    Raises:
        ModelError: a tensor is missing or wrong.
    """
    num_outputs, num_inputs = stored.shape
    if num_inputs % EXPONENT_INPUTS:
        raise ModelError(
            f"tensor '{stored.layer}.weight_packed': {num_inputs} inputs are no whole groups of "
            f"{EXPONENT_INPUTS}"
        )
    numbers = stored.take("weight_packed", [(num_outputs, num_inputs // 2)], (torch.uint8,))
    shape = (num_outputs, num_inputs // EXPONENT_INPUTS)
    exponents = stored.take("weight_scale", [shape], (torch.uint8, torch.float8_e8m0fnu)).view(torch.uint8)
    if bool((exponents == _NAN).any()):
        raise stored.bad("weight_scale", "has an exponent that stands for NaN")
    return MXFP4Rows(stored.place, stored.shape, numbers, exponents)
