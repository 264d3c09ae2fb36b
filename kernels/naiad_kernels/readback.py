"""Numbers of a step on their way back from a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Readback:
    """Tensors that are copied to the host as soon as they are computed, and waited for only when needed.

    Waiting ends with the copy: what the device was told to do after it may still be under way.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Queue the copies.

        Args:
            tensors: all of one device; on a CPU they are taken as they are.
        """
        self._tensors = list(tensors)
        self._event: torch.cuda.Event | None = None
        if tensors[0].is_cuda:
            self._tensors = [
                torch.empty(each.shape, dtype=each.dtype, pin_memory=True).copy_(each, non_blocking=True)
                for each in tensors
            ]
            # One that sleeps: a thread that spins takes a core from the server.
            self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._event.record()

    def wait(self) -> list[Tensor]:
        """The tensors on the host, in their order."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensors
