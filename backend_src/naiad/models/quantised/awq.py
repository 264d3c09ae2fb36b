"""AWQ in the order of its gemm kernel: eight numbers of four bits a word, packed along the outputs.

    qweight  int32 [K, N / 8]
    qzeros   int32 [groups, N / 8]
    scales   [groups, N]

W[n, k] = (number − zero point) · scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from naiad.config.quantised.layers import AWQLayer
from naiad.errors import ModelError
from naiad.models.quantised.bits import unpack
from naiad.models.quantised.stored import LayerTensors
from naiad_kernels.linear.quantised.kept import GPUForm
from naiad_kernels.native.nibbles import NibbleWeight

_BITS = 4
_NUMBERS = 8
# Output i of a word has these four bits, counted from the lowest.
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True, slots=True)
class AWQRows:
    """A `WeightRows` of AWQ.

    Attributes:
        place, shape: as `WeightRows` has them.
        words: `[in, out / 8]`, int32.
        zeros, scales: `[groups, out]`, float32.
        group_size: inputs that share a scale.
    """

    place: str
    shape: tuple[int, int]
    words: torch.Tensor
    zeros: torch.Tensor
    scales: torch.Tensor
    group_size: int

    def rows(self, first: int, last: int) -> torch.Tensor:
        """Compute rows; see `WeightRows`."""
        first_word, last_word = first // _NUMBERS, -(-last // _NUMBERS)
        skipped = first - first_word * _NUMBERS
        numbers = _in_order(self.words[:, first_word:last_word])[:, skipped : skipped + last - first].T
        zeros, scales = (
            each[:, first:last].T.repeat_interleave(self.group_size, 1)[:, : self.shape[1]]
            for each in (self.zeros, self.scales)
        )
        return numbers.float().sub_(zeros).mul_(scales)

    def nibbles(self) -> NibbleWeight | None:
        """Keep the numbers; see `WeightRows`."""
        return NibbleWeight.of_zero_points(_in_order(self.words).T, self.scales.T, self.zeros.T)

    def gpu_form(self) -> GPUForm | None:
        """None: `nibbles` has what can be kept; see `WeightRows`."""
        return None


def open_awq(layer: AWQLayer, stored: LayerTensors) -> AWQRows:
    """Take a layer's tensors.

    Raises:
        ModelError: a tensor is missing or wrong.
    """
    num_outputs, num_inputs = stored.shape
    size = num_inputs if layer.group_size == -1 else layer.group_size
    if num_outputs % _NUMBERS or num_inputs % size:
        raise ModelError(
            f"tensor '{stored.layer}.qweight': a layer of {num_outputs} × {num_inputs} has no whole words of "
            f"{_NUMBERS} outputs or no whole groups of {size} inputs"
        )
    num_groups = num_inputs // size
    words = stored.take("qweight", [(num_inputs, num_outputs // _NUMBERS)], (torch.int32,))
    packed = stored.take("qzeros", [(num_groups, num_outputs // _NUMBERS)], (torch.int32,))
    scales = stored.take_scales("scales", [(num_groups, num_outputs)])
    return AWQRows(stored.place, stored.shape, words, _in_order(packed).float(), scales, size)


def _in_order(words: torch.Tensor) -> torch.Tensor:
    """Unpack `[rows, words]` to `[rows, words · 8]`, uint8, outputs in ascending order."""
    numbers = unpack(words, _BITS, words.shape[1] * _NUMBERS)
    return numbers.view(len(words), -1, _NUMBERS)[:, :, _PLACES].flatten(1)
