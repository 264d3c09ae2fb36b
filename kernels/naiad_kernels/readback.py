"""Copies the numbers of a step back from a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Readback:
    """Copies tensors to the host as soon as they are computed; `wait` is called only when they are needed.

    Waiting ends with the copy: work that was queued after it may still be running.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Queue the copies.

        Args:
            tensors: all on one device; on a CPU they are used as they are.
        """
        self._tensors = list(tensors)
        self._event: torch.cuda.Event | None = None
        if tensors[0].is_cuda:
            self._tensors = [
                torch.empty(each.shape, dtype=each.dtype, pin_memory=True).copy_(each, non_blocking=True)
                for each in tensors
            ]
            # A blocking event sleeps: a spinning thread would take a core from the server.
            self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._event.record()

    def wait(self) -> list[Tensor]:
        """Return the tensors on the host, in order."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensors
