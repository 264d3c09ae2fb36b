"""Safetensors files of a model directory: each tensor is read once, by name."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from naiad.config.checkpoint_json import parse_json
from naiad.errors import ModelError
from naiad.file_identity import FileIdentity

_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
# A file's pages count as this process's memory once they are read, until the file is opened again.
_MAX_MAPPED_BYTES = 32 << 20


class SafetensorsFiles:
    """A `TensorFiles` of safetensors."""

    def __init__(self, directory: str | Path) -> None:
        """Open every weight file; headers are read and checked against the files' sizes.

        Args:
            directory: contains model.safetensors, or one file of another name, or an index and its shards.

        Raises:
            ModelError: names the file that is missing or damaged.
        """
        self._directory = Path(directory)
        self._file_of: dict[str, str] = {}
        self._files: dict[str, Any] = {}
        self._opened: dict[str, FileIdentity] = {}
        self._num_read: Counter[str] = Counter()
        index = self._read_index()
        for name in sorted(set(index.values())) if index is not None else [self._single_file()]:
            self._open(name)
        for tensor, file in (index or {}).items():
            if self._file_of.get(tensor) != file:
                raise ModelError(f"{file} has no tensor {tensor!r}, which {_INDEX_FILE} places there")

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this name that was not taken yet."""
        return name in self._file_of

    def take(self, name: str) -> tuple[str, torch.Tensor]:
        """Read a tensor in place; see `TensorFiles`.

        Raises:
            ModelError: there is no such tensor, it cannot be read, or its file was changed meanwhile.
        """
        file = self._file_of.pop(name, None)
        if file is None:
            raise ModelError(f"{', '.join(sorted(self._files))}: tensor {name!r} is missing")
        try:
            if self._num_read[file] > _MAX_MAPPED_BYTES:
                self._open_again(file)
            tensor: torch.Tensor = self._files[file].get_tensor(name)
        except (SafetensorError, OSError, RuntimeError, ValueError) as error:
            raise ModelError(f"{file}: tensor {name!r} can not be read: {error}") from error
        self._num_read[file] += tensor.nbytes
        return file, tensor

    def drop(self, name: str) -> None:
        """Skip a tensor."""
        self._file_of.pop(name, None)

    def left(self) -> dict[str, str]:
        """The tensors that were neither taken nor dropped, and their files."""
        return dict(sorted(self._file_of.items()))

    def close(self) -> None:
        """Close the files."""
        self._files.clear()
        self._file_of.clear()

    def _single_file(self) -> str:
        """The usual name, or that of the only file: old GPTQ files are named for their bits."""
        names = [path.name for path in self._directory.glob("*.safetensors")]
        is_other = len(names) == 1 and not (self._directory / _INDEX_FILE).exists()
        return names[0] if is_other else _SINGLE_FILE

    def _read_index(self) -> dict[str, str] | None:
        """Return the index's map from tensors to files; None for a single file."""
        if (self._directory / self._single_file()).exists():
            return None
        path = self._directory / _INDEX_FILE
        try:
            weight_map = parse_json(path.read_text(encoding="utf-8"))["weight_map"]
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
            # Before it is opened: a file that replaces it in between is another one when it is opened again.
            self._opened[name] = FileIdentity.of(path)
            file = safe_open(path, framework="pt", device="cpu")
            names: list[str] = list(file.keys())  # type: ignore[no-untyped-call]
        except (SafetensorError, OSError, ValueError) as error:
            raise ModelError(f"{name} is damaged or incomplete: {error}") from error
        for tensor in names:
            if tensor in self._file_of:
                raise ModelError(f"{name}: tensor {tensor!r} is also in {self._file_of[tensor]}")
            self._file_of[tensor] = name
        self._files[name] = file

    def _open_again(self, name: str) -> None:
        path = self._directory / name
        self._files[name] = safe_open(path, framework="pt", device="cpu")
        if FileIdentity.of(path) != self._opened[name]:
            raise ModelError(f"{name} was changed while it was read: load the model again")
        self._num_read[name] = 0
