"""Copies a step's inputs from the host to a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

# Compiled kernels rely on this alignment; tensors aligned differently would need other variants.
_ALIGNMENT_BYTES = 16
_NUMPY_KINDS = {torch.int64: "i8", torch.int32: "i4", torch.float64: "f8"}


class Staging:
    """Writes lists to one pinned buffer and copies them to the device in one asynchronous copy.

    The buffer belongs to one step: torch reuses its memory when the copy is done.
    """

    def __init__(self, num_bytes: int, device: torch.device, target: torch.Tensor | None = None) -> None:
        """Allocate the memory.

        Args:
            num_bytes: at least `bytes_for` of all lists.
            device: destination of the copy.
            target: `[≥ num_bytes]` uint8 on the device, to be overwritten; None: new memory.
        """
        self._host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._numbers = self._host.numpy()
        self._target = torch.empty(num_bytes, dtype=torch.uint8, device=device) if target is None else target
        self._end = 0

    @staticmethod
    def bytes_for(num_wide: Sequence[int], num_narrow: Sequence[int]) -> int:
        """Return the bytes needed for lists of 8-byte and of 4-byte numbers with these lengths."""
        sizes = [8 * num for num in num_wide] + [4 * num for num in num_narrow]
        return sum(_aligned(size) for size in sizes)

    def put(self, values: Sequence[float] | npt.NDArray[Any], dtype: torch.dtype) -> torch.Tensor:
        """Return the tensor that holds the values after `send`: `[len(values)]` on the device.

        Args:
            values: in range of `dtype`.
            dtype: int64, int32 or float64.
        """
        begin, end = self._end, self._end + len(values) * dtype.itemsize
        assert end <= len(self._numbers), "more is put than `num_bytes` holds"
        self._numbers[begin:end].view(_NUMPY_KINDS[dtype])[:] = values
        self._end = _aligned(end)
        return self._target[begin:end].view(dtype)

    def put_table(
        self, lines: Sequence[Sequence[int]], counts: Sequence[int], shape: tuple[int, int]
    ) -> torch.Tensor:
        """Return the int32 table of this shape that holds the lines, padded with zeros, after `send`.

        Args:
            lines: at most `shape[0]` lines.
            counts: how many numbers of each line are written.
            shape: number of lines and columns of the table.
        """
        num_bytes = shape[0] * shape[1] * torch.int32.itemsize
        begin, end = self._end, self._end + num_bytes
        assert end <= len(self._numbers), "more is put than `num_bytes` holds"
        table = self._numbers[begin:end].view(np.int32).reshape(shape)
        table.fill(0)
        for place, line, count in zip(table, lines, counts, strict=False):
            assert len(line) >= count, (line, count)
            place[:count] = line[:count]
        self._end = _aligned(end)
        return self._target[begin:end].view(torch.int32).view(shape)

    def send(self) -> None:
        """Queue one copy of everything that was put, after the work already queued on the device."""
        num_bytes = min(self._end, len(self._numbers))
        self._target[:num_bytes].copy_(self._host[:num_bytes], non_blocking=True)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
