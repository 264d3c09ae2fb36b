"""Whether a response fits into the shared memory between a model's process and the server.

The server's Python backend takes a response sender for closed once it was asked to send FINAL, also when the
response did not fit (seen on 2.51). A client would then wait for an end that nobody can send, so the room is
looked at first.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy.typing as npt

from naiad.errors import UnavailableError

SHARED_MEMORY = Path("/dev/shm")
# What is smaller fits into the 1 MiB with which a region begins, beside others that are on their way.
_SMALL_BYTES = 32 << 10
# A region grows by 1 MiB, and so may that of another model at the same time.
_SPARE_BYTES = 2 << 20


def check_room(tensors: Mapping[str, npt.NDArray[Any]], shared_memory: Path = SHARED_MEMORY) -> None:
    """Check that a response of these tensors can be sent.

    Raises:
        UnavailableError: it is large, and the shared memory is nearly full.
    """
    num_bytes = sum(map(_size, tensors.values()))
    if num_bytes <= _SMALL_BYTES:
        return
    state = os.statvfs(shared_memory)
    free = state.f_bavail * state.f_frsize
    if free < num_bytes + _SPARE_BYTES:
        raise UnavailableError(
            f"a response of {num_bytes} bytes does not fit into the server's shared memory now: "
            f"{free} bytes are free, and {_SPARE_BYTES} have to stay so"
        )


def _size(tensor: npt.NDArray[Any]) -> int:
    if tensor.dtype == object:
        return sum(map(len, tensor.flat))
    return tensor.nbytes
