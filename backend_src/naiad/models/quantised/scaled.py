"""One number a byte, int8 or float8_e4m3fn, with scales of tensors, outputs, groups or blocks.

    weight             int8 or float8_e4m3fn [N, K]
    weight_scale       [1], [N, 1], [N, groups] or [⌈N / block⌉, ⌈K / block⌉]; weight_scale_inv in some files
    weight_zero_point  int8, shaped like the scales

W = (number − zero point) · scale, also where the scale is called inv. Static scales of activations are not
used.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from naiad.config.quantised.layers import ScaledLayer
from naiad.errors import ModelError
from naiad.models.quantised.rows import WeightRows
from naiad.models.quantised.stored import SCALE_DTYPES, LayerTensors
from naiad_kernels.linear.quantised.kept import GPUForm
from naiad_kernels.linear.quantised.weights import SPAN, ByteWeight
from naiad_kernels.native.nibbles import NibbleWeight

_EXPONENTS = torch.float8_e8m0fnu
# The only numbers that are not finite, with either sign.
_FLOAT8_NAN = 0x7F
_ACTIVATION_PARTS = (
    "input_scale",
    "input_zero_point",
    "output_scale",
    "output_zero_point",
    "activation_scale",
)


@dataclass(frozen=True, slots=True)
class ScaledRows:
    """A `WeightRows` of bytes.

    Attributes:
        place, shape: as `WeightRows` has them.
        numbers: `[out, in]`.
        scales, zeros: `[blocks of outputs, blocks of inputs]`, float32; zeros may be None.
        block: outputs and inputs that share a scale; the last ones of each may be fewer.
        rounds_inputs: the layer is made for inputs that are rounded to the dtype of the numbers.
    """

    place: str
    shape: tuple[int, int]
    numbers: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    block: tuple[int, int]
    rounds_inputs: bool

    def rows(self, first: int, last: int) -> torch.Tensor:
        """Compute rows; see `WeightRows`."""
        numbers = self.numbers[first:last].float()
        of_row = torch.arange(first, last) // self.block[0]
        of_column = torch.arange(self.shape[1]) // self.block[1]
        if self.zeros is not None:
            numbers.sub_(self.zeros[of_row][:, of_column])
        return numbers.mul_(self.scales[of_row][:, of_column])

    def nibbles(self) -> NibbleWeight | None:
        """None: bytes have more than four bits; see `WeightRows`."""
        return None

    def gpu_form(self) -> GPUForm | None:
        """Copy the bytes, and each scale for every output that shares it; see `WeightRows`."""
        is_float = self.numbers.dtype == torch.float8_e4m3fn
        if self.zeros is not None or (is_float and not self.rounds_inputs):
            return None
        scales = self.scales.repeat_interleave(self.block[0], 0)[: self.shape[0]].T.contiguous()
        if len(scales) == 1:
            return ByteWeight(self.numbers.clone(), scales[0], rounds_inputs=self.rounds_inputs)
        if not is_float or self.block[1] % SPAN:
            return None
        return ByteWeight(self.numbers.clone(), scales, rounds_inputs=True, group_size=self.block[1])


def kept_for_gpu(weight: WeightRows) -> GPUForm | None:
    """What only the kernels for a GPU multiply by; see `WeightRows.gpu_form`.

    Raises:
        ModelError: a weight is not finite; names file and tensor.
    """
    form = weight.gpu_form()
    if not isinstance(form, ByteWeight) or form.values.dtype == torch.int8:
        return form
    if bool((form.values.view(torch.uint8) & _FLOAT8_NAN == _FLOAT8_NAN).any()):
        raise ModelError(f"{weight.place}: a weight is not finite")
    return form


def open_scaled(layer: ScaledLayer, stored: LayerTensors) -> ScaledRows:
    """Take a layer's tensors.

    Raises:
        ModelError: a tensor is missing or wrong.
    """
    dtype = torch.float8_e4m3fn if layer.is_float else torch.int8
    numbers = stored.take("weight", [stored.shape], (dtype,))
    _check_range(layer, stored, numbers)
    block, shapes = _blocks(layer, stored)
    grid = shapes[0]
    name = next(filter(stored.has, layer.scale_names), layer.scale_names[0])
    scales = stored.take_scales(name, shapes, (*SCALE_DTYPES, _EXPONENTS)).reshape(grid)
    zeros = None
    if not layer.is_symmetric:
        zeros = stored.take("weight_zero_point", shapes, (torch.int8,)).float().reshape(grid)
    rows = ScaledRows(stored.place, stored.shape, numbers, scales, zeros, block, layer.rounds_inputs)
    stored.skip(_ACTIVATION_PARTS)
    return rows


def _blocks(layer: ScaledLayer, stored: LayerTensors) -> tuple[tuple[int, int], list[tuple[int, ...]]]:
    """The size of a block, and the shapes that the scales may have, that of two dimensions first."""
    num_outputs, num_inputs = stored.shape
    scales = layer.scales
    if scales.strategy == "tensor":
        return stored.shape, [(1, 1), (1,), ()]
    if scales.strategy == "channel":
        return (1, num_inputs), [(num_outputs, 1), (num_outputs,)]
    if scales.strategy == "group":
        if num_inputs % scales.group_size:
            raise ModelError(
                f"tensor '{stored.layer}.weight': {num_inputs} inputs are no whole groups of "
                f"{scales.group_size}"
            )
        return (1, scales.group_size), [(num_outputs, num_inputs // scales.group_size)]
    outputs, inputs = scales.block
    return scales.block, [(-(-num_outputs // outputs), -(-num_inputs // inputs))]


def _check_range(layer: ScaledLayer, stored: LayerTensors, numbers: torch.Tensor) -> None:
    if layer.is_float or layer.bits == 8:
        return
    half = 1 << layer.bits - 1
    if int(numbers.min()) < -half or int(numbers.max()) >= half:
        raise stored.bad("weight", f"has a number of more than {layer.bits} bits")
