"""Copies a step's results from a GPU to the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Readback:
    """Copies tensors to the host as soon as they are computed; `wait` blocks until the copy is complete.

    `wait` does not wait for work that was queued after the copy.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Queue the copies.

        Args:
            tensors: all on one device; tensors on a CPU are not copied.
        """
        self._tensors = list(tensors)
        self._event: torch.cuda.Event | None = None
        if tensors[0].is_cuda:
            self._tensors = [
                torch.empty(each.shape, dtype=each.dtype, pin_memory=True).copy_(each, non_blocking=True)
                for each in tensors
            ]
            # Waiting for a blocking event sleeps; a spinning thread would take a core from the server.
            self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._event.record()

    def wait(self) -> list[Tensor]:
        """Return the tensors on the host, in order."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensors
