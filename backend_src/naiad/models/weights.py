"""`Weights`: what a model takes its weights from; `Checkpoint`: a source of weights, in the model's dtype."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch

from naiad.config import ModelConfig
from naiad.models.quantised import WeightRows, kept_for_gpu, kept_nibbles, materialised
from naiad.models.safetensors_files import SafetensorsFiles
from naiad.models.sources import SafetensorsSource, WeightSource
from naiad_kernels.linear import LinearWeight, LoadOptions
from naiad_kernels.linear.quantised.kept import KeptWeight
from naiad_kernels.native.nibbles import NibbleWeight

# So many are converted at a time to be compared.
_COMPARED_WEIGHTS = 1 << 22


class Weights(Protocol):
    """Where a model takes its weights from: a `Checkpoint`, or what an earlier start has made of one."""

    @property
    def options(self) -> LoadOptions:
        """How the model is loaded."""

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return one tensor; see `Checkpoint.take`."""

    def prepared_table(
        self, name: str, shape: tuple[int, int], make: Callable[[Checkpoint], torch.Tensor]
    ) -> torch.Tensor:
        """Return a table that is made of the checkpoint's tensors, or was made of them at an earlier start.

        Args:
            name: unique among the model's tensors and weights.
            shape: the shape that follows from the configuration.
            make: makes it; it depends on nothing but the checkpoint and the options.
        """

    def prepared_linear(
        self, name: str, shape: tuple[int, int], make: Callable[[Checkpoint], LinearWeight]
    ) -> LinearWeight:
        """Return a linear layer's weight likewise.

        Args:
            name: as in `prepared_table`.
            shape: the output features and the input features that follow from the configuration.
            make: as in `prepared_table`.
        """

    def finish(self) -> None:
        """Tell that the model has all its weights; see `Checkpoint.finish`."""


class Checkpoint:
    """The weights of a checkpoint; each is taken once, and none may be left over.

    Attributes:
        options: how the model is loaded.
    """

    def __init__(
        self, directory: str | Path, options: LoadOptions, config: ModelConfig | None = None
    ) -> None:
        """Open every weight file; headers are read and checked against the files' sizes.

        Args:
            directory: contains model.safetensors, or an index and its shards; or a GGUF file.
            options: dtype and device of the tensors that `take` returns, and how linear layers are laid out.
            config: says how the weights are quantised; None: they are not.

        Raises:
            ModelError: names the file that is missing or damaged.
        """
        self.options = options
        self._source = _open_source(Path(directory), config)

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        """Read one weight as a copy on the options' device.

        Args:
            name: the tensor's name.
            shape: the shape that follows from the configuration.
            dtype: the copy's dtype; None: that of the options.

        Raises:
            ModelError: there is no such tensor, or its shape or dtype is not the expected one; names
                file and tensor.
        """
        return self._copy(self._source.read(name, shape), shape, dtype or self.options.dtype)

    def take_matrix(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Read a weight as `take` does; native kernels get one that is stored in bfloat16 as it is.

        Raises:
            ModelError: as `take`.
        """
        return self._matrix(self._source.read(name, shape), shape)

    def _matrix(self, weight: torch.Tensor | WeightRows, shape: tuple[int, ...]) -> torch.Tensor:
        is_kept = self.options.native and isinstance(weight, torch.Tensor) and weight.dtype == torch.bfloat16
        return self._copy(weight, shape, torch.bfloat16 if is_kept else self.options.dtype)

    def take_projection(self, name: str, shape: tuple[int, int]) -> torch.Tensor | KeptWeight:
        """Read a weight as `take_matrix` does, or keep its numbers of few bits if the options ask for such.

        Kept numbers are on the CPU.

        Raises:
            ModelError: as `take`.
        """
        weight = self._source.read(name, shape)
        kept: KeptWeight | None = None
        if not isinstance(weight, torch.Tensor):
            if self.options.packed or self.options.quantization == "int4":
                kept = kept_nibbles(weight)
            if self.options.packed and kept is None:
                kept = kept_for_gpu(weight)
        return self._matrix(weight, shape) if kept is None else kept

    def take_with_nibbles(
        self, name: str, shape: tuple[int, int]
    ) -> tuple[torch.Tensor, NibbleWeight | None]:
        """Read a weight as `take_matrix` does, and its numbers if it has four bits that the options keep.

        Raises:
            ModelError: as `take`.
        """
        weight = self._source.read(name, shape)
        kept: NibbleWeight | None = None
        keeps_nibbles = self.options.native and self.options.quantization == "int4"
        if keeps_nibbles and not isinstance(weight, torch.Tensor):
            kept = kept_nibbles(weight)
        return self._matrix(weight, shape), kept

    def prepared_table(
        self, name: str, shape: tuple[int, int], make: Callable[[Checkpoint], torch.Tensor]
    ) -> torch.Tensor:
        """Make it; see `Weights.prepared_table`."""
        return make(self)

    def prepared_linear(
        self, name: str, shape: tuple[int, int], make: Callable[[Checkpoint], LinearWeight]
    ) -> LinearWeight:
        """Make it; see `Weights.prepared_linear`."""
        return make(self)

    def is_missing_or_same(self, name: str, matrix: torch.Tensor) -> bool:
        """Whether a tensor is not stored, or is a copy of another one; it is read and not kept.

        Args:
            name: the tensor's name.
            matrix: the other one, as `take_matrix` has read it.

        Raises:
            ModelError: as `take`, or the tensor is quantised.
        """
        copy = self._source.take_copy(name, (matrix.shape[0], matrix.shape[1]))
        if copy is None:
            return True
        device, dtype = self.options.device, self.options.dtype
        rows = max(1, _COMPARED_WEIGHTS // matrix.shape[1])
        return all(
            torch.equal(*(each[first : first + rows].to(device, dtype) for each in (copy, matrix)))
            for first in range(0, len(matrix), rows)
        )

    def finish(self) -> None:
        """Close the files.

        Raises:
            ModelError: some tensors were not taken.
        """
        self._source.finish()

    def _copy(
        self, weight: torch.Tensor | WeightRows, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        if not isinstance(weight, torch.Tensor):
            matrix = materialised(weight, dtype).to(self.options.device)
            return matrix if len(shape) > 1 else matrix.flatten()
        # Always copy: the file's memory mapping must not outlive loading.
        return weight.to(self.options.device, dtype, copy=True)


def _open_source(path: Path, config: ModelConfig | None) -> WeightSource:
    if config is not None and path.is_file():
        # Imported only here: it takes a tenth of a second.
        from naiad.models.gguf_source import GGUFSource

        return GGUFSource(path, config)
    quantised = None if config is None else config.quantised
    return SafetensorsSource(SafetensorsFiles(path), quantised)
