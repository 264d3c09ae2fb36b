"""`Scheme`: how weights of linear layers are rounded, and how compressed-tensors' configuration says it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

METHODS = ("rtn", "gptq", "awq")
FORMATS = ("compressed-tensors",)
BITS = (4, 8)
GROUP_SIZES = (32, 64, 128)
PACKED, BYTES = "pack-quantized", "int-quantized"
HEAD = "lm_head"


@dataclass(frozen=True, slots=True)
class Scheme:
    """Four bits with a scale for each group of inputs, or eight with one for each output.

    Attributes:
        bits: of a number: 4 or 8.
        group_size: inputs that share a scale; 0 with eight bits.
        is_symmetric: there are no zero points; always with eight bits.
    """

    bits: int
    group_size: int
    is_symmetric: bool

    @property
    def form(self) -> str:
        """The format's name in compressed-tensors."""
        return PACKED if self.bits == 4 else BYTES

    @property
    def group(self) -> dict[str, Any]:
        """A group of compressed-tensors' configuration: all linear layers.

        Eight bits are meant for inputs that are rounded to eight bits too, with a scale for each token.
        """
        weights: dict[str, Any] = {"num_bits": self.bits, "type": "int", "symmetric": self.is_symmetric}
        if self.bits == 4:
            weights |= {"strategy": "group", "group_size": self.group_size}
            return {"targets": ["Linear"], "weights": weights}
        inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
        weights |= {"strategy": "channel"}
        return {"targets": ["Linear"], "weights": weights, "input_activations": inputs}

    @property
    def quantization_config(self) -> dict[str, Any]:
        """The object for config.json."""
        return {
            "quant_method": "compressed-tensors",
            "format": self.form,
            "quantization_status": "compressed",
            "config_groups": {"group_0": self.group},
            "ignore": [HEAD],
        }
