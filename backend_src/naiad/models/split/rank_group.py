"""`RankGroup`: how the ranks of a split model exchange tensors."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed

from naiad.models.split.part import Part

# The ranks are processes of one machine; without these the libraries listen where the machine's name leads.
_ON_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


class RankGroup:
    """The ranks of a split model. All call the same methods in the same order.

    Attributes:
        device: the tensors' device.
    """

    def __init__(self, part: Part, store: Path, device: torch.device) -> None:
        """Meet the other ranks; returns when all have come.

        Args:
            part: this rank's part.
            store: a file in a private directory, the same for all ranks, by which they find each other.
                It is not needed afterwards.
            device: the tensors' device.
        """
        self.device = device
        self._part = part
        os.environ.update(_ON_LOOPBACK)
        torch.distributed.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=torch.distributed.FileStore(str(store), part.size),  # type: ignore[attr-defined]
            rank=part.rank,
            world_size=part.size,
        )
        self.sum(torch.zeros(1, device=device))

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Replace `x` by the sum of all ranks' `x`, which are of one shape; return it."""
        torch.distributed.all_reduce(x)
        return x

    def from_first(self, x: torch.Tensor) -> torch.Tensor:
        """Replace `x` by the first rank's `x`; return it."""
        torch.distributed.broadcast(x, 0)
        return x

    def joined_at_first(self, x: torch.Tensor, count: int) -> torch.Tensor:
        """Join the ranks' columns at the first rank.

        Args:
            x: `[num_rows, len(part.of(count))]`.
            count: number of all columns.

        Returns:
            `[num_rows, count]` at the first rank, and no rows at others.
        """
        parts = [Part(rank, self._part.size) for rank in range(self._part.size)]
        widths = [len(part.of(count)) for part in parts]
        # What is gathered has one shape; no part is wider than the first.
        own = torch.nn.functional.pad(x, (0, widths[0] - x.shape[1])).contiguous()
        if self._part.rank:
            torch.distributed.gather(own, None, 0)
            return x.new_empty(0, count)
        gathered = [torch.empty_like(own) for _ in parts]
        torch.distributed.gather(own, gathered, 0)
        return torch.cat([each[:, :width] for each, width in zip(gathered, widths, strict=True)], dim=1)

    def leave(self) -> None:
        """Close the connections to the other ranks."""
        torch.distributed.destroy_process_group()
