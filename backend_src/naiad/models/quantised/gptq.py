"""GPTQ: numbers packed along the inputs, a scale and a zero point for each output and group of inputs.

    qweight  int32 [K · bits / 32, N]
    qzeros   int32 [groups, N · bits / 32]
    scales   [groups, N]
    g_idx    int32 [K], the group of each input; input i is in group i / group_size without it

W[n, k] = (number − zero point) · scale. Version 1 of the format stores zero points less one.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from naiad.config.quantised.layers import GPTQLayer
from naiad.errors import ModelError
from naiad.models.quantised.bits import num_words, unpack
from naiad.models.quantised.rows import in_order
from naiad.models.quantised.stored import LayerTensors
from naiad_kernels.linear.quantised.kept import GPUForm, ReorderedNibbles
from naiad_kernels.native.nibbles import NibbleWeight

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GPTQRows:
    """A `WeightRows` of GPTQ.

    Attributes:
        place, shape: as `WeightRows` has them.
        bits: of a number.
        words: `[num_words, out]`, int32.
        zeros, scales: `[groups, out]`, float32.
        group_ids: `[in]`, int64.
    """

    place: str
    shape: tuple[int, int]
    bits: int
    words: torch.Tensor
    zeros: torch.Tensor
    scales: torch.Tensor
    group_ids: torch.Tensor

    def rows(self, first: int, last: int) -> torch.Tensor:
        """Compute rows; see `WeightRows`."""
        numbers = unpack(self.words[:, first:last].T, self.bits, self.shape[1]).float()
        zeros, scales = (each[:, first:last].T[:, self.group_ids] for each in (self.zeros, self.scales))
        return numbers.sub_(zeros).mul_(scales)

    def nibbles(self) -> NibbleWeight | None:
        """Keep the numbers; see `WeightRows`."""
        if self.bits != 4 or not in_order(self.group_ids, len(self.scales)):
            return None
        numbers = unpack(self.words.T, self.bits, self.shape[1])
        return NibbleWeight.of_zero_points(numbers, self.scales.T, self.zeros.T)

    def gpu_form(self) -> GPUForm | None:
        """Sort numbers of four bits by group; see `WeightRows`."""
        if self.bits != 4:
            return None
        numbers = unpack(self.words.T, self.bits, self.shape[1])
        return ReorderedNibbles.of_groups(numbers, self.scales.T, self.zeros.T, self.group_ids)


def open_gptq(layer: GPTQLayer, stored: LayerTensors) -> GPTQRows:
    """Take a layer's tensors.

    Raises:
        ModelError: a tensor is missing or wrong.
    """
    num_outputs, num_inputs = stored.shape
    if num_inputs * layer.bits % 32 or num_outputs * layer.bits % 32:
        raise ModelError(
            f"tensor '{stored.layer}.qweight': numbers of {layer.bits} bits do not fill words of 32 bits in "
            f"a layer of {num_outputs} × {num_inputs}"
        )
    size = num_inputs if layer.group_size == -1 else layer.group_size
    num_groups = -(-num_inputs // size)
    words = stored.take("qweight", [(num_words(num_inputs, layer.bits), num_outputs)], (torch.int32,))
    scales = stored.take_scales("scales", [(num_groups, num_outputs)])
    zeros = _zero_points(layer, stored, num_groups)
    if stored.has("g_idx"):
        group_ids = stored.take_group_ids("g_idx", num_groups)
    elif layer.needs_group_ids:
        raise stored.bad("g_idx", "is missing: desc_act = true needs it")
    else:
        group_ids = torch.arange(num_inputs) // size
    return GPTQRows(stored.place, stored.shape, layer.bits, words, zeros, scales, group_ids)


def _zero_points(layer: GPTQLayer, stored: LayerTensors, num_groups: int) -> torch.Tensor:
    """Read the zero points; those of symmetric layers tell which version of the format it is."""
    num_outputs, half = stored.shape[0], 1 << layer.bits - 1
    packed = stored.take("qzeros", [(num_groups, num_words(num_outputs, layer.bits))], (torch.int32,))
    zeros = unpack(packed, layer.bits, num_outputs).float()
    if not layer.is_symmetric:
        return zeros.add_(1) if layer.adds_one else zeros
    value = int(zeros[0, 0])
    if value not in (half - 1, half) or not bool((zeros == value).all()):
        raise stored.bad(
            "qzeros", f"has zero points other than {half - 1} or {half} everywhere, and sym is true"
        )
    if (value == half - 1) != layer.adds_one:
        _LOG.info("%s has zero points of the other version of GPTQ than config.json says", stored.place)
    return torch.full_like(zeros, half)
