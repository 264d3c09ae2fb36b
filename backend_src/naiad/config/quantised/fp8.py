"""Reads `quantization_config` of checkpoints in float8_e4m3fn with scales of tensors or blocks."""

from __future__ import annotations

from dataclasses import dataclass

from naiad.config.checkpoint_json import Json, is_int
from naiad.config.quantised.keys import Keys
from naiad.config.quantised.layers import ScaledLayer, Scales, names_layer

_PATH = "quantization_config"
_MAX_BLOCK = 1 << 16


@dataclass(frozen=True, slots=True)
class FP8Weights:
    """The layers of an FP8 checkpoint.

    A layer that the configuration does not exclude may still be stored in full precision: its dtype says so.

    Attributes:
        default: the format of all layers.
        excluded: parts of the names of layers in full precision.
        unrounded: see `QuantisedWeights`.
    """

    default: ScaledLayer
    excluded: tuple[str, ...]
    unrounded: tuple[str, ...]

    method = "fp8"

    def layer(self, name: str) -> ScaledLayer | None:
        """How a layer is stored; see `QuantisedWeights.layer`."""
        return None if any(names_layer(part, name) for part in self.excluded) else self.default


def read(source: Json) -> FP8Weights:
    """Read the keys.

    Raises:
        ModelError: a key is missing, unknown or has an unsupported value.
    """
    keys = Keys(source, _PATH)
    keys.must_be("quant_method", "fp8")
    keys.must_be("fmt", "e4m3", "float8_e4m3fn")
    keys.must_be("is_checkpoint_fp8_serialized", True)
    scheme = keys.choice("activation_scheme", ("dynamic", "static"), "dynamic")
    block = _block(keys)
    # Scales that are powers of two are stored as floats, or as exponents, which the tensor's dtype says.
    keys.must_be("scale_fmt", "ue8m0", "float")
    keys.must_be("modules_to_convert")
    # Of mixtures of experts, which no family has.
    keys.must_be("expert_dtype", "fp8", "fp4")
    excluded = keys.texts("modules_to_not_convert", "ignored_layers")
    keys.skip(("dequantize",))
    keys.finish()
    default = ScaledLayer(
        is_float=True,
        bits=8,
        is_symmetric=True,
        scales=Scales(strategy="block", block=block) if block else Scales(strategy="tensor"),
        # One scale of a tensor has the one name or the other, and means the same.
        scale_names=("weight_scale_inv",) if block else ("weight_scale", "weight_scale_inv"),
        may_be_plain=True,
        rounds_inputs=True,
    )
    return FP8Weights(default, excluded, (f"inputs of linear layers ({scheme}, 8 bits)",))


def _block(keys: Keys) -> tuple[int, int] | None:
    block = keys.take("weight_block_size")
    if block is None:
        return None
    is_pair = isinstance(block, list) and len(block) == 2
    if not is_pair or not all(is_int(each) and 1 <= each <= _MAX_BLOCK for each in block):
        raise keys.bad("weight_block_size", block, f"two numbers in 1 … {_MAX_BLOCK}, or null")
    return block[0], block[1]
