"""How the weight of one linear layer is stored, `W[out, in]` of N × K, and which layers are stored so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class GPTQLayer:
    """Whole numbers packed along K, with a scale and a zero point for each output and group of inputs.

    Attributes:
        bits: of a number: 2, 3, 4 or 8.
        group_size: inputs that share a scale; −1: all of them. The last group may be smaller.
        is_symmetric: every zero point is half of the range.
        adds_one: the stored zero points are one too small, as in version 1 of the format.
        needs_group_ids: the layer must say which group each input belongs to; else it may.
    """

    bits: int
    group_size: int
    is_symmetric: bool
    adds_one: bool
    needs_group_ids: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class AWQLayer:
    """Numbers of four bits packed along N, eight a word, with scales and zero points as GPTQ has them.

    Attributes:
        group_size: inputs that share a scale; −1: all of them.
    """

    group_size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Scales:
    """Which weights share a scale.

    Attributes:
        strategy: "tensor", "channel" (an output), "group" (inputs of an output) or "block".
        group_size: inputs, for "group".
        block: outputs and inputs, for "block"; the last blocks may be smaller.
    """

    strategy: str
    group_size: int = 0
    block: tuple[int, int] = (0, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedLayer:
    """Numbers packed along K in words of 32 bits; each is stored with half of its range added.

    Attributes:
        bits: of a number, 1 … 8.
        is_symmetric: there are no zero points.
        scales: which weights share a scale.
        has_group_ids: the layer says which group each input belongs to.
    """

    bits: int
    is_symmetric: bool
    scales: Scales
    has_group_ids: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaledLayer:
    """One number a byte: int8, or float8_e4m3fn.

    Attributes:
        is_float: the numbers are float8_e4m3fn.
        bits: of an int8's range, at most 8.
        is_symmetric: there are no zero points.
        scales: which weights share a scale.
        scale_names: what the last part of the scale's name may be.
        may_be_plain: the layer may be stored in full precision instead.
        rounds_inputs: it is made for inputs that are rounded to the type of its numbers too.
    """

    is_float: bool
    bits: int
    is_symmetric: bool
    scales: Scales
    scale_names: tuple[str, ...]
    may_be_plain: bool
    rounds_inputs: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class MXFP4Layer:
    """Floats of four bits, two a byte along K, with an exponent for each 32 inputs."""


LayerFormat = GPTQLayer | AWQLayer | PackedLayer | ScaledLayer | MXFP4Layer


class QuantisedWeights(Protocol):
    """Which layers of a checkpoint are quantised, and how."""

    @property
    def method(self) -> str:
        """The checkpoint's quant_method."""

    @property
    def unrounded(self) -> tuple[str, ...]:
        """What the checkpoint rounds when it runs and Naiad does not, in words for the log."""

    def layer(self, name: str) -> LayerFormat | None:
        """How a linear layer is stored.

        Args:
            name: the layer's name, without ".weight".

        Returns:
            None: in full precision.

        Raises:
            ModelError: a pattern of the configuration takes too long to match the name.
        """


@dataclass(frozen=True, slots=True)
class BlocksOfFile:
    """The weights of a GGUF file, each of which says itself how it is stored."""

    method = "gguf"
    unrounded = ()

    def layer(self, name: str) -> LayerFormat | None:
        """None; see `QuantisedWeights.layer`."""


def names_layer(part: str, name: str) -> bool:
    """Whether a name without patterns, which may be a part of a layer's name, is about this layer."""
    return f".{part}." in f".{name}."
