"""`WeightRows`: a weight that is computed row by row from what a file stores."""

from __future__ import annotations

from typing import Protocol

import torch

from naiad.errors import ModelError
from naiad_kernels.linear.quantised.kept import GPUForm
from naiad_kernels.native.nibbles import NibbleWeight

# A piece of a weight is computed in float32 and some integers; this bounds how many weights it has.
_PIECE_WEIGHTS = 1 << 21


class WeightRows(Protocol):
    """A stored weight `W[out, in]`."""

    @property
    def place(self) -> str:
        """File and tensor, for error messages."""

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of outputs and inputs."""

    def rows(self, first: int, last: int) -> torch.Tensor:
        """Compute some outputs' weights.

        Returns:
            `[last − first, in]`, float32: exactly what is stored if the product of a number and its scale
            has at most 24 bits, else the nearest float32.
        """

    def nibbles(self) -> NibbleWeight | None:
        """What is stored, if it is numbers of four bits that the native kernels can keep; else None."""

    def gpu_form(self) -> GPUForm | None:
        """A copy of what is stored, if only the kernels for a GPU can multiply by it; else None."""


def in_order(group_ids: torch.Tensor, num_groups: int) -> bool:
    """Whether groups are equally many inputs each, one group after the other.

    Args:
        group_ids: `[in]`, the group of each input.
        num_groups: of the weight.
    """
    num_inputs = len(group_ids)
    if num_inputs % num_groups:
        return False
    return torch.equal(group_ids, torch.arange(num_inputs) // (num_inputs // num_groups))


def kept_nibbles(weight: WeightRows) -> NibbleWeight | None:
    """The numbers of four bits of a weight that has such; see `WeightRows.nibbles`.

    Raises:
        ModelError: a weight is not finite; names file and tensor.
    """
    nibbles = weight.nibbles()
    if nibbles is not None and not (nibbles.scales.isfinite().all() and nibbles.offsets.isfinite().all()):
        raise ModelError(f"{weight.place}: a weight is not finite")
    return nibbles


def materialised(weight: WeightRows, dtype: torch.dtype) -> torch.Tensor:
    """Compute a whole weight, piece by piece, on the CPU.

    Args:
        weight: what is stored.
        dtype: each weight is rounded to it once.

    Raises:
        ModelError: a weight is not finite; names file and tensor.
    """
    num_outputs, num_inputs = weight.shape
    matrix = torch.empty(weight.shape, dtype=dtype)
    step = max(1, _PIECE_WEIGHTS // num_inputs)
    for first in range(0, num_outputs, step):
        last = min(first + step, num_outputs)
        matrix[first:last] = weight.rows(first, last)
        if not torch.isfinite(matrix[first:last]).all():
            raise ModelError(f"{weight.place}: a weight is not finite, or too large for {dtype}")
    return matrix
