"""`StageSource`: reads the weights of one stage's layers."""

from __future__ import annotations

import re
from collections.abc import Collection

import torch

from naiad.models.quantised import WeightRows
from naiad.models.sources import WeightSource
from naiad.models.split.stage import Stage

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


class StageSource:
    """A `WeightSource` in which the first layer is the stage's first one. Nothing of other stages is read."""

    def __init__(self, whole: WeightSource, num_layers: int, stage: Stage) -> None:
        """Read the weights of a stage.

        Args:
            whole: reads the checkpoint.
            num_layers: number of layers of the whole model.
            stage: the stage.
        """
        self._whole = whole
        own = stage.layers(num_layers)
        self._first = own.start
        whole.leave([each for each in range(num_layers) if each not in own], not stage.is_first)

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor | WeightRows:
        """Read a weight; see `WeightSource`."""
        return self._whole.read(self._whole_name(name), shape)

    def take_copy(self, name: str, shape: tuple[int, int]) -> torch.Tensor | None:
        """Read a copy of the embedding; see `WeightSource`."""
        return self._whole.take_copy(self._whole_name(name), shape)

    def leave(self, layers: Collection[int], ends: bool) -> None:
        """Skip weights; see `WeightSource`."""
        self._whole.leave([self._first + each for each in layers], ends)

    def finish(self) -> None:
        """Close the files; see `WeightSource`."""
        self._whole.finish()

    def _whole_name(self, name: str) -> str:
        match = _LAYER.fullmatch(name)
        return name if match is None else f"model.layers.{self._first + int(match[1])}.{match[2]}"
