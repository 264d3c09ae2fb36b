"""What is asked of a tensor whose memory is read by its address."""

from __future__ import annotations

import torch

CPU = torch.device("cpu")


def check_array(
    name: str, array: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device = CPU
) -> None:
    """See that a tensor is contiguous, and of the dtype and shape that its reader takes it for.

    Args:
        name: by which an error calls it.
        array: the tensor.
        dtype: that it must have.
        shape: that it must have.
        device: where it must be.

    Raises:
        ValueError: it is another one.
    """
    if array.dtype != dtype or array.shape != shape or not array.is_contiguous() or array.device != device:
        found = f"{array.dtype} {tuple(array.shape)} on {array.device} with strides {array.stride()}"
        raise ValueError(f"{name} are {found}, not contiguous {dtype} {tuple(shape)} on {device}")
