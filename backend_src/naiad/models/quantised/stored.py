"""The tensors of one layer, as a format's reader takes them from the checkpoint's files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from naiad.errors import ModelError

SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class TensorFiles(Protocol):
    """Files with named tensors; each is taken once."""

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this name that was not taken yet."""

    def take(self, name: str) -> tuple[str, torch.Tensor]:
        """Read a tensor in place, to be copied before the next layer is read.

        Returns:
            The file's name, and the tensor.

        Raises:
            ModelError: there is none, or it is damaged.
        """


class LayerTensors:
    """The tensors whose names begin with a layer's.

    Attributes:
        layer: the layer's name.
        shape: numbers of outputs and inputs, as the configuration has them.
    """

    def __init__(self, files: TensorFiles, layer: str, shape: tuple[int, int]) -> None:
        """Take from these files."""
        self._files = files
        self.layer = layer
        self.shape = shape
        self._file = ""

    @property
    def place(self) -> str:
        """The file that was read last and the layer, for error messages."""
        return f"{self._file}: tensor '{self.layer}'"

    def has(self, part: str) -> bool:
        """Whether the layer has a tensor of this name."""
        return self._files.has(f"{self.layer}.{part}")

    def take(
        self, part: str, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype]
    ) -> torch.Tensor:
        """Read a tensor in place.

        Args:
            part: the last part of its name.
            shapes: the shapes that it may have.
            dtypes: the dtypes that it may have.

        Raises:
            ModelError: it is missing, damaged, or has another shape or dtype.
        """
        self._file, tensor = self._files.take(f"{self.layer}.{part}")
        if tuple(tensor.shape) not in shapes:
            expected = " or ".join(map(str, dict.fromkeys(shapes)))
            raise self.bad(part, f"has shape {tuple(tensor.shape)}, config.json asks for {expected}")
        if tensor.dtype not in dtypes:
            raise self.bad(part, f"has dtype {tensor.dtype}: expected {' or '.join(map(str, dtypes))}")
        return tensor

    def take_scales(
        self, part: str, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype] = SCALE_DTYPES
    ) -> torch.Tensor:
        """Read scales as float32, a copy.

        Raises:
            ModelError: as `take`, or a scale is zero, negative, infinite or NaN.
        """
        scales = self.take(part, shapes, dtypes).to(torch.float32, copy=True)
        if not bool(((scales > 0) & torch.isfinite(scales)).all()):
            raise self.bad(part, "has a scale that is not a positive finite number")
        return scales

    def take_group_ids(self, part: str, num_groups: int) -> torch.Tensor:
        """Read the group of each input as int64.

        Raises:
            ModelError: as `take`, or a group does not exist.
        """
        ids = self.take(part, [self.shape[1:]], (torch.int32, torch.int64)).long()
        if int(ids.min()) < 0 or int(ids.max()) >= num_groups:
            raise self.bad(part, f"has a group outside [0, {num_groups})")
        return ids

    def skip(self, parts: Sequence[str]) -> None:
        """Take tensors that are not used."""
        for part in parts:
            if self.has(part):
                self._files.take(f"{self.layer}.{part}")

    def bad(self, part: str, what: str) -> ModelError:
        """Make the error for one tensor."""
        return ModelError(f"{self._file}: tensor '{self.layer}.{part}' {what}")
