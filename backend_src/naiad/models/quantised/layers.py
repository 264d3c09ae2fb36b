"""Finds the tensors of a quantised layer and the reader of its format."""

from __future__ import annotations

from naiad.config.quantised.layers import (
    AWQLayer,
    GPTQLayer,
    LayerFormat,
    MXFP4Layer,
    PackedLayer,
    QuantisedWeights,
)
from naiad.errors import ModelError
from naiad.models.quantised.awq import open_awq
from naiad.models.quantised.gptq import open_gptq
from naiad.models.quantised.mxfp4 import open_mxfp4
from naiad.models.quantised.packed import open_packed
from naiad.models.quantised.rows import WeightRows
from naiad.models.quantised.scaled import open_scaled
from naiad.models.quantised.stored import LayerTensors, TensorFiles

# Tensors that only quantised layers have.
_PARTS = ("qweight", "weight_packed", "weight_scale", "weight_scale_inv")


def open_layer(
    quantised: QuantisedWeights, files: TensorFiles, layer: str, shape: tuple[int, int]
) -> WeightRows | None:
    """Find how a layer is stored, and take its tensors.

    Args:
        quantised: the checkpoint's description.
        files: its tensors.
        layer: the layer's name, without ".weight".
        shape: numbers of outputs and inputs.

    Returns:
        None: the layer is stored in full precision; nothing was taken.

    Raises:
        ModelError: a tensor is missing or wrong, or the layer is not stored as the configuration says.
    """
    found = [part for part in _PARTS if files.has(f"{layer}.{part}")]
    form = quantised.layer(layer)
    if form is None or (not found and _may_be_plain(form)):
        if found:
            raise ModelError(
                f"tensor '{layer}.{found[0]}' is quantised, and config.json says that {layer!r} is not"
            )
        return None
    return _open(form, LayerTensors(files, layer, shape))


def _may_be_plain(form: LayerFormat) -> bool:
    """Whether the configuration leaves open if the layer is quantised."""
    if isinstance(form, (GPTQLayer, AWQLayer)):
        return True
    return not isinstance(form, (PackedLayer, MXFP4Layer)) and form.may_be_plain


def _open(form: LayerFormat, stored: LayerTensors) -> WeightRows:
    if isinstance(form, GPTQLayer):
        return open_gptq(form, stored)
    if isinstance(form, AWQLayer):
        return open_awq(form, stored)
    if isinstance(form, PackedLayer):
        return open_packed(form, stored)
    if isinstance(form, MXFP4Layer):
        return open_mxfp4(stored)
    return open_scaled(form, stored)
