"""Weights as the native kernels read them, in a file that the next start maps into memory.

At the first start a model takes its weights from a `PackingCheckpoint`, which writes each into the file and
gives it out from there. At later starts a `PackedCheckpoint` gives them out without the checkpoint.

A checkpoint may bring such a file along, from whoever made it. So the file decides about numbers alone, as
the checkpoint does: shapes come from the configuration, and what does not fit is packed anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import TypeVar

import torch

import naiad
import naiad_kernels
from naiad.config import ModelConfig
from naiad.freed_memory import give_back_memory
from naiad.models.array_file import PAGE_BYTES, ArrayFile, ArrayFileError, ArrayWriter
from naiad.models.checkpoint_cache import CheckpointCache
from naiad.models.weights import Checkpoint
from naiad.models.whole_file import remove_left_parts, written_whole
from naiad_kernels.linear import LinearWeight, LoadOptions
from naiad_kernels.native.library import Product
from naiad_kernels.native.panels import NativeWeight

_LOG = logging.getLogger(__name__)
_Model = TypeVar("_Model")
_NAIAD = Path(naiad.__file__).parent
# All code here may decide what is read of a checkpoint, and how it is laid out.
_CODE = (
    _NAIAD / "models",
    _NAIAD / "config",
    _NAIAD / "gguf",
    Path(naiad_kernels.__file__).parent,
)
_TABLE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# No file is larger than this many times the weights in float32, and padding besides.
_MAX_GROWTH = 2
_MAX_PADDING_BYTES = 64 << 20
_GIB = 1 << 30
# With scales and zero points or minimums.
_NIBBLE_BYTES = 0.625
# So much more than the file takes must be free: the disk should not be full afterwards.
_SPARE_BYTES = _GIB // 2
_SPARE_SHARE = 0.1


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

    def prepared_table(
        self, name: str, shape: tuple[int, int], make: Callable[[Checkpoint], torch.Tensor]
    ) -> torch.Tensor:
        """Make a table and write it."""
        return self._writer.add(name, make(self._checkpoint))

    def prepared_linear(
        self, name: str, shape: tuple[int, int], make: Callable[[Checkpoint], LinearWeight]
    ) -> NativeWeight:
        """Make a weight and write it."""
        made = make(self._checkpoint)
        assert isinstance(made, NativeWeight), f"{type(made).__name__} cannot be kept in a file"
        assert (made.out_features, made.in_features) == shape, (name, shape)
        self._writer.notes[name] = {"product": made.product.name}
        return replace(
            made,
            panels=self._writer.add(_panels_of(name), made.panels),
            bias=None if made.bias is None else self._writer.add(_bias_of(name), made.bias),
            scales=None if made.scales is None else self._writer.add(_scales_of(name), made.scales),
        )

    @property
    def panels(self) -> torch.Tensor | None:
        """The mapped memory that has the panels of all weights, once it is finished: `[num_bytes]`, uint8."""
        return _all_panels(self._writer)

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
        """Return a tensor.

        Raises:
            ArrayFileError: the file has no such tensor.
        """
        return self._array(name, shape, (dtype or self.options.dtype,))

    def prepared_table(
        self, name: str, shape: tuple[int, int], make: Callable[[Checkpoint], torch.Tensor]
    ) -> torch.Tensor:
        """Return the table that was made when the file was written.

        Raises:
            ArrayFileError: the file has no such table.
        """
        return self._array(name, shape, _TABLE_DTYPES)

    def prepared_linear(
        self, name: str, shape: tuple[int, int], make: Callable[[Checkpoint], LinearWeight]
    ) -> NativeWeight:
        """Return the weight that was made when the file was written.

        Raises:
            ArrayFileError: the file has no such weight.
        """
        out_features, in_features = shape
        product = Product.__members__.get(str(self._file.notes.get(name, {}).get("product")))
        if product is None:
            raise ArrayFileError(f"{name} has no product that is known")
        panels = self._file.array(_panels_of(name))
        bias, scales = self._optional(_bias_of(name)), self._optional(_scales_of(name))
        try:
            return NativeWeight(panels, bias, scales, product, in_features, out_features)
        except ValueError as error:
            raise ArrayFileError(f"{name}: {error}") from error

    @property
    def panels(self) -> torch.Tensor | None:
        """The mapped memory that has the panels of all weights: `[num_bytes]`, uint8."""
        return _all_panels(self._file)

    def finish(self) -> None:
        """Nothing is left over in such a file."""

    def _array(self, name: str, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> torch.Tensor:
        array = self._file.array(name)
        if array.shape != shape or array.dtype not in dtypes:
            raise ArrayFileError(f"{name} is {array.dtype} {tuple(array.shape)}, not {dtypes} {shape}")
        return array

    def _optional(self, name: str) -> torch.Tensor | None:
        return self._file.array(name) if name in self._file.names else None


def from_packed(
    cache: CheckpointCache, options: LoadOptions, build: Callable[[PackedCheckpoint], _Model]
) -> _Model | None:
    """Build a model of the file of an earlier start.

    Args:
        cache: the checkpoint's.
        options: how the model is loaded.
        build: makes the model of the file's weights.

    Returns:
        None: there is no file, or it is damaged, or it was made of another checkpoint or by other code, or
        does not have the weights that the model asks for; a line of the log says which.
    """
    key = _key(cache, options)
    for path in cache.find(_file_name(options)):
        try:
            file = ArrayFile(path)
            if file.key != key:
                raise ArrayFileError("it was made of another checkpoint, or by another release")
            if cache.sha256(path, PAGE_BYTES) != file.sha256:
                raise ArrayFileError("its content is damaged")
            return build(PackedCheckpoint(file, options))
        except (OSError, ArrayFileError) as error:
            _LOG.info("%s is not used: %s", path, error)
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
    remove_left_parts(cache.folder)
    _check_space(cache.folder, _packed_bytes(config, options))
    path = cache.folder / _file_name(options)
    max_bytes = _MAX_GROWTH * torch.float32.itemsize * config.num_weights + _MAX_PADDING_BYTES
    with written_whole(path, cache.file_mode) as part:
        writer = ArrayWriter(part, key, max_bytes)
        yield PackingCheckpoint(Checkpoint(cache.model_dir, options, config), writer)
        if not cache.is_unchanged:
            raise OSError("the checkpoint was changed while it was read")
    cache.remember(path, PAGE_BYTES, writer.sha256)
    give_back_memory()


def _packed_bytes(config: ModelConfig, options: LoadOptions) -> int:
    """Roughly what a file takes: the projections, the head, and the embedding in the model's dtype."""
    projection_bytes = head_bytes = float(options.dtype.itemsize)
    if options.quantization != "none":
        projection_bytes, head_bytes = _NIBBLE_BYTES if options.quantization == "int4" else 1, 1
    elif config.quantised is None and config.dtype != "float32":
        # Native code reads weights of 16 bits as they are.
        projection_bytes = head_bytes = 2
    num_table_weights = config.vocab_size * config.hidden_size
    tables_bytes = num_table_weights * (head_bytes + options.dtype.itemsize)
    return int(config.num_projection_weights * projection_bytes + tables_bytes)


def _check_space(folder: Path, num_bytes: int) -> None:
    """See that a file leaves room on its disk.

    Raises:
        OSError: it does not.
    """
    needed_bytes = int(num_bytes * (1 + _SPARE_SHARE)) + _SPARE_BYTES
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise OSError(
            f"the packed weights take about {num_bytes / _GIB:.1f} GiB, for which "
            f"{needed_bytes / _GIB:.1f} GiB should be free in {folder}: {free_bytes / _GIB:.1f} GiB are"
        )


def _all_panels(file: ArrayFile | ArrayWriter) -> torch.Tensor | None:
    """From the first weight on: before it is the embedding, of which a step reads few rows."""
    first = next(iter(file.notes), None)
    return None if first is None else file.bytes_from(_panels_of(first))


def _panels_of(weight: str) -> str:
    return f"{weight}/panels"


def _bias_of(weight: str) -> str:
    return f"{weight}/bias"


def _scales_of(weight: str) -> str:
    return f"{weight}/scales"


def _file_name(options: LoadOptions) -> str:
    """A file for each dtype and rounding, so that a newer one replaces the older one, in any release."""
    rounding = "" if options.quantization == "none" else f"-{options.quantization}"
    return f"{str(options.dtype).removeprefix('torch.')}{rounding}.weights"


def _key(cache: CheckpointCache, options: LoadOptions) -> str:
    """Return a digest of everything that decides the file's content."""
    # This library computes the numbers that blocks of a GGUF file stand for.
    made_by = f"gguf {metadata.version('gguf')}"
    digest = hashlib.sha256(f"{cache.fingerprint} {options!r} {made_by}\n".encode())
    for folder in _CODE:
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.relative_to(folder.parent).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
