"""Reads safetensors checkpoints one tensor at a time and checks names, shapes and dtypes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from safetensors import SafetensorError, safe_open

from naiad.errors import ModelError
from naiad_kernels.linear import LinearWeight, LoadOptions

_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
# Old exporters stored the rotary frequencies, which the configuration determines.
_IGNORED_SUFFIX = ".rotary_emb.inv_freq"
_FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# A file's pages count as this process's memory once they are read, until the file is opened again.
_MAX_MAPPED_BYTES = 32 << 20

Prepared = TypeVar("Prepared", bound="torch.Tensor | LinearWeight")


class Weights(Protocol):
    """Where a model takes its weights from: a `Checkpoint`, or what an earlier start has made of one."""

    @property
    def options(self) -> LoadOptions:
        """How the model is loaded."""

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return one tensor; see `Checkpoint.take`."""

    def prepared(self, name: str, make: Callable[[Checkpoint], Prepared]) -> Prepared:
        """Return what is made of the checkpoint's tensors, or was made of them at an earlier start.

        Args:
            name: unique among the model's tensors and these.
            make: makes it; it depends on nothing but the checkpoint and the options.
        """

    def drop(self, name: str) -> None:
        """Skip a tensor that duplicates another."""

    def finish(self) -> None:
        """Tell that the model has all its weights; see `Checkpoint.finish`."""


class Checkpoint:
    """The tensors of a model directory; each is taken once, and none may be left over.

    Attributes:
        options: how the model is loaded.
    """

    def __init__(self, directory: str | Path, options: LoadOptions) -> None:
        """Open every weight file; headers are read and checked against the files' sizes.

        Args:
            directory: contains model.safetensors, or an index and its shards.
            options: dtype and device of the tensors that `take` returns, and how linear layers are laid out.

        Raises:
            ModelError: names the file that is missing or damaged.
        """
        self._directory = Path(directory)
        self.options = options
        self._file_of: dict[str, str] = {}
        self._files: dict[str, Any] = {}
        self._num_read: Counter[str] = Counter()
        index = self._read_index()
        for name in sorted(set(index.values())) if index is not None else [_SINGLE_FILE]:
            self._open(name)
        for tensor, file in (index or {}).items():
            if self._file_of.get(tensor) != file:
                raise ModelError(f"{file} has no tensor {tensor!r}, which {_INDEX_FILE} places there")

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        """Read one tensor as a copy on the options' device.

        Args:
            name: the tensor's name.
            shape: the shape that follows from the configuration.
            dtype: the copy's dtype; None: that of the options.

        Raises:
            ModelError: there is no such tensor, or its shape or dtype is not the expected one; names
                file and tensor.
        """
        tensor = self._read(name, shape)
        # Always copy: the file's memory mapping must not outlive loading.
        return tensor.to(self.options.device, dtype or self.options.dtype, copy=True)

    def take_matrix(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Read a weight as `take` does; native kernels get one that is stored in bfloat16 as it is.

        Raises:
            ModelError: as `take`.
        """
        tensor = self._read(name, shape)
        is_kept = self.options.native and tensor.dtype == torch.bfloat16
        return tensor.to(self.options.device, tensor.dtype if is_kept else self.options.dtype, copy=True)

    def prepared(self, name: str, make: Callable[[Checkpoint], Prepared]) -> Prepared:
        """Make it; see `Weights.prepared`."""
        return make(self)

    def drop(self, name: str) -> None:
        """Skip a tensor that duplicates another."""
        self._file_of.pop(name, None)

    def finish(self) -> None:
        """Close the files.

        Raises:
            ModelError: some tensors were not taken.
        """
        left = sorted(name for name in self._file_of if not name.endswith(_IGNORED_SUFFIX))
        if left:
            first = left[0]
            raise ModelError(
                f"{self._file_of[first]}: {len(left)} tensors the architecture has no place for, "
                f"the first is {first!r}"
            )
        self._files.clear()
        self._file_of.clear()

    def _read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Read one tensor in place, to be copied before the next one is read."""
        file = self._file_of.pop(name, None)
        if file is None:
            raise ModelError(f"{self._place()}: tensor {name!r} is missing")
        if self._num_read[file] > _MAX_MAPPED_BYTES:
            self._files[file] = safe_open(self._directory / file, framework="pt", device="cpu")
            self._num_read[file] = 0
        try:
            tensor: torch.Tensor = self._files[file].get_tensor(name)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise ModelError(f"{file}: tensor {name!r} can not be read: {error}") from error
        if tuple(tensor.shape) != shape:
            raise ModelError(
                f"{file}: tensor {name!r} has shape {tuple(tensor.shape)}, config.json asks for {shape}"
            )
        if tensor.dtype not in _FLOAT_DTYPES:
            raise ModelError(
                f"{file}: tensor {name!r} has dtype {tensor.dtype}: expected float32, bfloat16 or float16"
            )
        self._num_read[file] += tensor.nbytes
        return tensor

    def _place(self) -> str:
        return ", ".join(sorted(self._files))

    def _read_index(self) -> dict[str, str] | None:
        """Return the index's map from tensors to files; None for a single file."""
        if (self._directory / _SINGLE_FILE).exists():
            return None
        path = self._directory / _INDEX_FILE
        try:
            weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        except FileNotFoundError:
            raise ModelError(
                f"{self._directory} has no weights: expected {_SINGLE_FILE} or {_INDEX_FILE} and its shards"
            ) from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ModelError(f"{_INDEX_FILE} has no readable weight_map: {error!r}") from error
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{_INDEX_FILE}: weight_map is not an object with entries")
        for file in weight_map.values():
            if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
                raise ModelError(
                    f"{_INDEX_FILE}: {file!r} is not the name of a .safetensors file in its directory"
                )
        return weight_map

    def _open(self, name: str) -> None:
        path = self._directory / name
        if not path.is_file():
            raise ModelError(f"{name} is missing: {_INDEX_FILE} lists it as a shard")
        try:
            file = safe_open(path, framework="pt", device="cpu")
            names: list[str] = list(file.keys())  # type: ignore[no-untyped-call]
        except (SafetensorError, OSError, ValueError) as error:
            raise ModelError(f"{name} is damaged or incomplete: {error}") from error
        for tensor in names:
            if tensor in self._file_of:
                raise ModelError(f"{name}: tensor {tensor!r} is also in {self._file_of[tensor]}")
            self._file_of[tensor] = name
        self._files[name] = file
