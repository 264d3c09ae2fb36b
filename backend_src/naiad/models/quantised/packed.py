"""compressed-tensors, pack-quantized: signed numbers, stored with half of their range added.

    weight_packed      int32 [N, words]
    weight_scale       [1], [N, 1] or [N, groups]
    weight_zero_point  int32 [words, groups], packed along the outputs; int8 [N, groups] in old files
    weight_shape       int64 [2], N and K
    weight_g_idx       int32 [K], the group of each input, if the configuration says so

Since May 2026 numbers of 3, 5, 6 and 7 bits are packed without gaps; before, none crossed a word's border.
How many words a row has tells which.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from naiad.config.quantised.layers import PackedLayer
from naiad.errors import ModelError
from naiad.models.quantised.bits import WORD_BITS, num_padded_words, num_words, unpack, unpack_padded
from naiad.models.quantised.rows import in_order
from naiad.models.quantised.stored import LayerTensors
from naiad_kernels.linear.quantised.kept import GPUForm, ReorderedNibbles
from naiad_kernels.native.nibbles import NibbleWeight


@dataclass(frozen=True, slots=True)
class PackedRows:
    """A `WeightRows` of packed numbers.

    Attributes:
        place, shape: as `WeightRows` has them.
        bits: of a number.
        has_gaps: no number crosses a word's border.
        words: `[out, num_words]`, int32.
        zeros: `[out, groups]`, float32, of the stored numbers.
        scales: `[out, groups]`, float32.
        group_ids: `[in]`, int64.
    """

    place: str
    shape: tuple[int, int]
    bits: int
    has_gaps: bool
    words: torch.Tensor
    zeros: torch.Tensor
    scales: torch.Tensor
    group_ids: torch.Tensor

    def rows(self, first: int, last: int) -> torch.Tensor:
        """Compute rows; see `WeightRows`."""
        unpacked = unpack_padded if self.has_gaps else unpack
        numbers = unpacked(self.words[first:last], self.bits, self.shape[1]).float()
        zeros, scales = (each[first:last][:, self.group_ids] for each in (self.zeros, self.scales))
        return numbers.sub_(zeros).mul_(scales)

    def nibbles(self) -> NibbleWeight | None:
        """Keep the numbers; see `WeightRows`."""
        if self.bits != 4 or not in_order(self.group_ids, self.scales.shape[1]):
            return None
        return NibbleWeight.of_zero_points(unpack(self.words, 4, self.shape[1]), self.scales, self.zeros)

    def gpu_form(self) -> GPUForm | None:
        """Sort numbers of four bits by group; see `WeightRows`."""
        if self.bits != 4:
            return None
        numbers = unpack(self.words, 4, self.shape[1])
        return ReorderedNibbles.of_groups(numbers, self.scales, self.zeros, self.group_ids)


def open_packed(layer: PackedLayer, stored: LayerTensors) -> PackedRows:
    """Take a layer's tensors.

    Raises:
        ModelError: a tensor is missing or wrong.
    """
    num_outputs, num_inputs = stored.shape
    size = layer.scales.group_size or num_inputs
    if num_inputs % size:
        raise ModelError(
            f"tensor '{stored.layer}.weight_packed': {num_inputs} inputs are no whole groups of {size}"
        )
    num_groups = num_inputs // size
    if stored.has("weight_shape"):
        said = stored.take("weight_shape", [(2,)], (torch.int64, torch.int32)).tolist()
        if said != [num_outputs, num_inputs]:
            raise stored.bad("weight_shape", f"is {said}, config.json asks for {[num_outputs, num_inputs]}")
    shapes = [(num_outputs, each(num_inputs, layer.bits)) for each in (num_words, num_padded_words)]
    words = stored.take("weight_packed", shapes, (torch.int32,))
    has_gaps = _has_gaps(layer.bits, num_inputs, words.shape[1], stored, "weight_packed")
    is_tensor = layer.scales.strategy == "tensor"
    scale_shapes: list[tuple[int, ...]] = [(1,), (), (1, 1)] if is_tensor else [(num_outputs, num_groups)]
    scales = stored.take_scales("weight_scale", scale_shapes).reshape(-1, num_groups)
    scales = scales.expand(num_outputs, -1)
    zeros = torch.full_like(scales, 1 << layer.bits - 1)
    if not layer.is_symmetric:
        zeros = _zero_points(layer, stored, num_groups)
    group_ids = torch.arange(num_inputs) // size
    if layer.has_group_ids:
        group_ids = stored.take_group_ids("weight_g_idx", num_groups)
    return PackedRows(stored.place, stored.shape, layer.bits, has_gaps, words, zeros, scales, group_ids)


def _zero_points(layer: PackedLayer, stored: LayerTensors, num_groups: int) -> torch.Tensor:
    """The zero points of the stored numbers, which have half of the range added: `[out, groups]` float32."""
    name, num_outputs, half = "weight_zero_point", stored.shape[0], 1 << layer.bits - 1
    if layer.scales.strategy == "tensor":
        zeros = stored.take(name, [(1,), (), (1, 1)], (torch.int8,)).reshape(1, 1).float() + half
        return _checked(zeros.expand(num_outputs, 1), layer, stored)
    shapes = [(each(num_outputs, layer.bits), num_groups) for each in (num_words, num_padded_words)]
    zeros = stored.take(name, [*shapes, (num_outputs, num_groups)], (torch.int32, torch.int8))
    if zeros.dtype == torch.int8:
        if len(zeros) != num_outputs:
            raise stored.bad(name, f"has {len(zeros)} rows of int8: expected {num_outputs}")
        return _checked(zeros.float() + half, layer, stored)
    if tuple(zeros.shape) not in shapes:
        raise stored.bad(name, f"has {len(zeros)} rows of int32: expected {shapes[0][0]}")
    has_gaps = _has_gaps(layer.bits, num_outputs, len(zeros), stored, name)
    unpacked = unpack_padded if has_gaps else unpack
    return unpacked(zeros.T.contiguous(), layer.bits, num_outputs).T.float()


def _checked(zeros: torch.Tensor, layer: PackedLayer, stored: LayerTensors) -> torch.Tensor:
    if not bool(((zeros >= 0) & (zeros < 1 << layer.bits)).all()):
        raise stored.bad("weight_zero_point", f"has a zero point of more than {layer.bits} bits")
    return zeros


def _has_gaps(bits: int, count: int, words: int, stored: LayerTensors, part: str) -> bool:
    if WORD_BITS % bits == 0:
        return False
    dense, padded = num_words(count, bits), num_padded_words(count, bits)
    if dense == padded and count > WORD_BITS // bits:
        raise stored.bad(part, f"packs {count} numbers of {bits} bits: too few to tell how they are packed")
    return words == padded
