"""Weights as the native kernels read them, in a file that the next start maps into memory.

At the first start a model takes its weights from a `PackingCheckpoint`, which writes each into the file and
gives it out from there. At later starts a `PackedCheckpoint` gives them out without the checkpoint.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import shutil
from collections.abc import Callable, Iterator
from enum import IntEnum
from pathlib import Path
from typing import Any, cast, get_type_hints

import torch

import naiad_kernels.linear
import naiad_kernels.native.nibbles
import naiad_kernels.native.panels
from naiad.config import ModelConfig
from naiad.freed_memory import give_back_memory
from naiad.models.array_file import PAGE_BYTES, ArrayFile, ArrayFileError, ArrayWriter
from naiad.models.checkpoint_cache import CheckpointCache
from naiad.models.weights import Checkpoint, Prepared
from naiad.models.whole_file import written_whole
from naiad_kernels.linear import LoadOptions
from naiad_kernels.native.panels import NativeWeight

_LOG = logging.getLogger(__name__)
_CLASSES = {each.__name__: each for each in (NativeWeight,)}
# All that decides how a weight is laid out.
_CODE = (
    *sorted(Path(__file__).parent.rglob("*.py")),
    *sorted(Path(naiad_kernels.linear.__file__).parent.glob("*.py")),
    Path(naiad_kernels.native.panels.__file__),
    Path(naiad_kernels.native.nibbles.__file__),
)
# The file may be larger than the checkpoint: float32 for 16 bits, a tied head of its own, padding.
_MAX_GROWTH = 4
_MAX_PADDING_BYTES = 64 << 20
# Weights of four bits take 16 or 32 when they are computed with; of two bits twice as much.
_QUANTISED_GROWTH = 8
# So many times the checkpoint's size must be free: the disk should not be full afterwards.
_LEAST_FREE = 3


class PackingCheckpoint:
    """A checkpoint whose weights are written into a file as they are taken."""

    def __init__(self, checkpoint: Checkpoint, writer: ArrayWriter) -> None:
        """Take from a checkpoint, write to a file."""
        self.options = checkpoint.options
        self._checkpoint = checkpoint
        self._writer = writer

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        """Read a tensor and write it."""
        return self._writer.add(name, self._checkpoint.take(name, shape, dtype))

    def prepared(self, name: str, make: Callable[[Checkpoint], Prepared]) -> Prepared:
        """Make a tensor or a weight and write it."""
        made = make(self._checkpoint)
        if isinstance(made, torch.Tensor):
            return cast(Prepared, self._writer.add(name, made))
        kind = type(made)
        assert _CLASSES.get(kind.__name__) is kind, f"{kind.__name__} cannot be kept in a file"
        note: dict[str, int | str] = {"class": kind.__name__}
        values: dict[str, Any] = {}
        for field in dataclasses.fields(cast(Any, made)):
            value = values[field.name] = getattr(made, field.name)
            if isinstance(value, torch.Tensor):
                values[field.name] = self._writer.add(f"{name}/{field.name}", value)
            elif value is not None:
                note[field.name] = int(value)
        self._writer.notes[name] = note
        return cast(Prepared, kind(**values))

    def drop(self, name: str) -> None:
        """Skip a tensor that duplicates another."""
        self._checkpoint.drop(name)

    @property
    def panels(self) -> torch.Tensor | None:
        """The mapped memory that has the panels of all weights, once it is finished: `[num_bytes]`, uint8."""
        return _panels(self._writer)

    def finish(self) -> None:
        """Complete the file; see `Checkpoint.finish`."""
        self._checkpoint.finish()
        self._writer.finish()
        self._writer.forget_pages()


class PackedCheckpoint:
    """The weights of such a file, mapped into memory."""

    def __init__(self, file: ArrayFile, options: LoadOptions) -> None:
        """Give out the weights of a file that was made from the same checkpoint with the same options."""
        self.options = options
        self._file = file

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return a tensor."""
        tensor = self._file.array(name)
        assert tensor.shape == shape, (name, tensor.shape, shape)
        assert tensor.dtype == (dtype or self.options.dtype), (name, tensor.dtype)
        return tensor

    def prepared(self, name: str, make: Callable[[Checkpoint], Prepared]) -> Prepared:
        """Return what was made when the file was written."""
        note = self._file.notes.get(name)
        if note is None:
            return cast(Prepared, self._file.array(name))
        kind = _CLASSES[str(note["class"])]
        hints = get_type_hints(kind)
        values: dict[str, Any] = {}
        for field in dataclasses.fields(kind):
            hint, array = hints[field.name], f"{name}/{field.name}"
            value: Any = self._file.array(array) if array in self._file.names else note.get(field.name)
            is_enum = isinstance(hint, type) and issubclass(hint, IntEnum)
            values[field.name] = hint(value) if is_enum else value
        return cast(Prepared, kind(**values))

    @property
    def panels(self) -> torch.Tensor | None:
        """The mapped memory that has the panels of all weights: `[num_bytes]`, uint8."""
        return _panels(self._file)

    def drop(self, name: str) -> None:
        """Nothing is left over in such a file."""

    def finish(self) -> None:
        """Nothing is left over in such a file."""


def open_packed(cache: CheckpointCache, options: LoadOptions) -> PackedCheckpoint | None:
    """Open the file of an earlier start.

    Returns:
        None: there is none, or it is damaged, or it was made of another checkpoint or by other code.
    """
    key = _key(cache, options)
    for path in cache.find(_file_name(options)):
        try:
            file = ArrayFile(path)
            if file.key != key:
                raise ArrayFileError("it was made of another checkpoint, or by another release")
            if cache.sha256(path, PAGE_BYTES) != file.sha256:
                raise ArrayFileError("its content is damaged")
        except (OSError, ArrayFileError) as error:
            _LOG.info("%s is not used: %s", path, error)
        else:
            return PackedCheckpoint(file, options)
    return None


@contextlib.contextmanager
def packing(cache: CheckpointCache, options: LoadOptions, config: ModelConfig) -> Iterator[PackingCheckpoint]:
    """Open a checkpoint whose weights are kept for the next start if the block ends well.

    Args:
        cache: the checkpoint's.
        options: how the model is loaded.
        config: the checkpoint's configuration.

    Raises:
        OSError: no file can be kept.
        ModelError: the checkpoint is not suitable; see `Checkpoint`.
    """
    if cache.folder is None:
        raise OSError("neither the checkpoint's directory nor the user's cache can be written to")
    key = _key(cache, options)
    growth = 1 if config.quantised is None else _QUANTISED_GROWTH
    max_bytes = _MAX_GROWTH * growth * cache.num_source_bytes + _MAX_PADDING_BYTES
    path = cache.folder / _file_name(options)
    if shutil.disk_usage(cache.folder).free < _LEAST_FREE * growth * cache.num_source_bytes:
        raise OSError(f"the disk of {cache.folder} is almost full")
    with written_whole(path, cache.file_mode) as part:
        writer = ArrayWriter(part, key, max_bytes)
        yield PackingCheckpoint(Checkpoint(cache.model_dir, options, config), writer)
        if not cache.is_unchanged:
            raise OSError("the checkpoint was changed while it was read")
    cache.remember(path, PAGE_BYTES, writer.sha256)
    give_back_memory()


def _panels(file: ArrayFile | ArrayWriter) -> torch.Tensor | None:
    """From the first weight on: before it is the embedding, of which a step reads few rows."""
    first = next(iter(file.notes), None)
    return None if first is None else file.bytes_from(f"{first}/panels")


def _file_name(options: LoadOptions) -> str:
    """A file for each way to load a checkpoint, so that a newer one replaces the older one."""
    digest = hashlib.sha256(repr(options).encode()).hexdigest()[:8]
    return f"{str(options.dtype).removeprefix('torch.')}-{digest}.weights"


def _key(cache: CheckpointCache, options: LoadOptions) -> str:
    """Return a digest of everything that decides the file's content."""
    digest = hashlib.sha256(f"{cache.fingerprint} {options!r}\n".encode())
    for path in _CODE:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
