"""Weights in large pages of memory, which the native kernels read faster than the small ones of a file."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import mmap
from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch

from naiad.config.memory import available_memory_bytes
from naiad.models.weights import Checkpoint, Prepared, Weights
from naiad_kernels.linear import LoadOptions
from naiad_kernels.native.panels import NativeWeight

_LOG = logging.getLogger(__name__)
_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
# The system takes memory only as it is written, so what is left of a piece costs nothing.
_PIECE_BYTES = 64 << 20
# So much memory stays available for everything else.
_SPARE_BYTES = 512 << 20
_ALIGNMENT = 64


def large_memory(num_bytes: int) -> mmap.mmap:
    """Memory of the process's own, zero, which the system provides in large pages as it is written."""
    memory = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without large pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def has_large_pages(setting: Path = _SETTING) -> bool:
    """Whether the system gives large pages to programs that ask for them."""
    try:
        return "[never]" not in setting.read_text(encoding="ascii")
    except OSError:
        return False


class LargePages:
    """Keeps copies of tensors in large pages, as long as there is memory for them."""

    def __init__(self, available_bytes: Callable[[], int] = available_memory_bytes) -> None:
        """Begin without memory.

        Args:
            available_bytes: says how much memory may still be allocated.
        """
        self._available_bytes = available_bytes
        self._piece = torch.empty(0, dtype=torch.uint8)
        self._is_short = False

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of a contiguous tensor; the tensor itself once memory is short."""
        size = -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        if size > len(self._piece) and not self._begin_piece(size):
            return tensor
        copy = self._piece[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        self._piece = self._piece[size:]
        return copy.copy_(tensor)

    def _begin_piece(self, num_bytes: int) -> bool:
        num_bytes = max(num_bytes, _PIECE_BYTES)
        if not self._is_short and self._available_bytes() < num_bytes + _SPARE_BYTES:
            self._is_short = True
            _LOG.info("memory is short: weights stay in small pages, which are read more slowly")
        if not self._is_short:
            self._piece = torch.frombuffer(large_memory(num_bytes), dtype=torch.uint8)
        return not self._is_short


class WeightsInLargePages:
    """Weights of which the native kernels' panels are kept in large pages."""

    def __init__(self, weights: Weights, pages: LargePages) -> None:
        """Take from these weights."""
        self._weights = weights
        self._pages = pages

    @property
    def options(self) -> LoadOptions:
        """How the model is loaded."""
        return self._weights.options

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return a tensor as it is: of embeddings a step reads few rows."""
        return self._weights.take(name, shape, dtype)

    def prepared(self, name: str, make: Callable[[Checkpoint], Prepared]) -> Prepared:
        """Return what is made of the checkpoint's tensors, its panels in large pages."""
        made = self._weights.prepared(name, make)
        if not isinstance(made, NativeWeight):
            return made
        return cast(Prepared, dataclasses.replace(made, panels=self._pages.keep(made.panels)))

    def drop(self, name: str) -> None:
        """Skip a tensor that duplicates another."""
        self._weights.drop(name)

    def finish(self) -> None:
        """Tell that the model has all its weights."""
        self._weights.finish()
