"""`WeightSource`: where a checkpoint's weights lie, whatever form they are stored in."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Protocol

import torch

from naiad.config.quantised import QuantisedWeights
from naiad.errors import ModelError
from naiad.models.quantised import WeightRows, open_layer
from naiad.models.safetensors_files import SafetensorsFiles

_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_ENDS = ("model.embed_tokens.", "lm_head.")
# Old exporters stored the rotary frequencies, which the configuration determines.
_IGNORED_SUFFIX = ".rotary_emb.inv_freq"
# Scales of a KV cache in eight bits; ours is kept as the configuration of the engine says.
_CACHE_SCALES = (".k_scale", ".v_scale", ".q_scale", ".prob_scale", ".k_zero_point", ".v_zero_point")
_FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_WEIGHT, _BIAS = ".weight", ".bias"


class WeightSource(Protocol):
    """The weights of a checkpoint by their names in safetensors files; each is read once."""

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor | WeightRows:
        """Read a weight in place, to be copied before the next one is read.

        Args:
            name: the weight's name.
            shape: the shape that follows from the configuration.

        Returns:
            A tensor of a floating dtype, or rows if what is stored has to be computed.

        Raises:
            ModelError: the weight is missing, damaged, or of another shape or dtype; names file and tensor.
        """

    def take_copy(self, name: str, shape: tuple[int, int]) -> torch.Tensor | None:
        """Read a weight in place that should be a copy of the embedding.

        Args:
            name: the weight's name.
            shape: the shape that follows from the configuration.

        Returns:
            None: it is not stored.

        Raises:
            ModelError: as `read`, or it is quantised.
        """

    def leave(self, layers: Collection[int], ends: bool) -> None:
        """Skip all weights of these layers, and perhaps those of embedding and head, if there are any."""

    def finish(self) -> None:
        """Close the files.

        Raises:
            ModelError: some weights were not read.
        """


class SafetensorsSource:
    """A `WeightSource` of safetensors files, whose linear layers may be quantised."""

    def __init__(self, files: SafetensorsFiles, quantised: QuantisedWeights | None) -> None:
        """Read from these files.

        Args:
            files: the checkpoint's.
            quantised: which layers are quantised, and how; None: none is.
        """
        self._files = files
        self._quantised = quantised
        self._opened: set[str] = set()

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor | WeightRows:
        """Read a weight; see `WeightSource`."""
        layer = name.removesuffix(_WEIGHT)
        if self._quantised is not None and layer != name and len(shape) == 2 and not self._is_plain(name):
            rows = open_layer(self._quantised, self._files, layer, (shape[0], shape[1]))
            if rows is not None:
                self._opened.add(layer)
                return rows
        return self._plain(name, shape)

    def _plain(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        file, tensor = self._files.take(name)
        if tuple(tensor.shape) != shape:
            raise ModelError(
                f"{file}: tensor {name!r} has shape {tuple(tensor.shape)}, config.json asks for {shape}"
            )
        if tensor.dtype not in _FLOAT_DTYPES:
            raise ModelError(
                f"{file}: tensor {name!r} has dtype {tensor.dtype}: expected float32, bfloat16 or float16"
            )
        return tensor

    def take_copy(self, name: str, shape: tuple[int, int]) -> torch.Tensor | None:
        """Read a copy of the embedding; see `WeightSource`."""
        layer = name.removesuffix(_WEIGHT)
        for part in ("qweight", "weight_packed", "weight_scale", "weight_scale_inv"):
            if self._files.has(f"{layer}.{part}"):
                raise ModelError(
                    f"tensor '{layer}.{part}' is there, and tie_word_embeddings = true in config.json says "
                    "that the head is the embedding, which is not quantised"
                )
        return self._plain(name, shape) if self._files.has(name) else None

    def leave(self, layers: Collection[int], ends: bool) -> None:
        """Skip weights; see `WeightSource`."""
        for name in self._files.left():
            match = _LAYER.match(name)
            if int(match[1]) in layers if match else ends and name.startswith(_ENDS):
                self._files.drop(name)

    def finish(self) -> None:
        """Close the files; see `WeightSource`."""
        left = {name: file for name, file in self._files.left().items() if not self._may_be_left(name)}
        if left:
            first, file = next(iter(left.items()))
            raise ModelError(
                f"{file}: {len(left)} tensors the architecture has no place for, the first is {first!r}"
            )
        self._files.close()

    def _is_plain(self, name: str) -> bool:
        """Whether a weight belongs to no linear layer."""
        return name == "model.embed_tokens.weight"

    def _may_be_left(self, name: str) -> bool:
        if name.endswith(_IGNORED_SUFFIX):
            return True
        if self._quantised is None:
            return False
        if name.endswith(_CACHE_SCALES):
            return "the KV cache" in self._quantised.unrounded
        # Old exporters gave each quantised layer a bias of zeros.
        is_bias = name.endswith(_BIAS) and name.removesuffix(_BIAS) in self._opened
        return is_bias and not bool(self._files.take(name)[1].any())
