"""`RankGroup`: how the ranks of a split model exchange tensors."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed

from naiad.models.split.part import Part
from naiad.models.split.place import Place

# The ranks are processes of one machine; without these the libraries listen where the machine's name leads.
_ON_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


class Sending(Protocol):
    """A tensor that is on its way to another rank."""

    def wait(self) -> object:
        """Wait until it is taken, or until the device's later work waits for that."""


class RankGroup:
    """The ranks of a split model. The ranks of a stage call the same methods in the same order.

    Attributes:
        device: the tensors' device.
    """

    def __init__(self, place: Place, store: Path, device: torch.device) -> None:
        """Meet the other ranks; returns when all have come.

        Args:
            place: this rank's.
            store: a file in a private directory, the same for all ranks, by which they find each other.
                It is not needed afterwards.
            device: the tensors' device.
        """
        self.device = device
        self._place = place
        self._part = place.part
        os.environ.update(_ON_LOOPBACK)
        torch.distributed.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=torch.distributed.FileStore(str(store), place.num_ranks),  # type: ignore[attr-defined]
            rank=place.rank,
            world_size=place.num_ranks,
        )
        size, count = place.part.size, place.stage.count
        ranks = range(place.num_ranks)
        self._stage_group = self._onward = self._back = None
        if count > 1:
            self._stage_group = self._own_group([ranks[stage * size :][:size] for stage in range(count)])
            # Two stages send to each other at the same time, which takes a connection for each direction.
            self._onward = self._own_group([ranks[part::size] for part in range(size)])
            self._back = self._own_group([ranks[part::size] for part in range(size)])
        self._meet()

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Replace `x` by the sum of `x` over the stage's ranks, which are of one shape; return it."""
        torch.distributed.all_reduce(x, group=self._stage_group)
        return x

    def from_first(self, x: torch.Tensor) -> torch.Tensor:
        """Replace `x` by the first rank's `x`, at the first stage; return it."""
        torch.distributed.broadcast(x, 0, group=self._stage_group)
        return x

    def joined_at_first(self, x: torch.Tensor, count: int) -> torch.Tensor:
        """Join the columns of the first stage's ranks at the first rank.

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
            torch.distributed.gather(own, None, 0, group=self._stage_group)
            return x.new_empty(0, count)
        gathered = [torch.empty_like(own) for _ in parts]
        torch.distributed.gather(own, gathered, 0, group=self._stage_group)
        return torch.cat([each[:, :width] for each, width in zip(gathered, widths, strict=True)], dim=1)

    def to_next(self, x: torch.Tensor) -> Sending:
        """Begin to send `x` to the same part of the next stage; the last stage sends to the first.

        Args:
            x: must not change until it is taken.
        """
        group = self._back if self._place.stage.is_last else self._onward
        sending = torch.distributed.isend(x.contiguous(), self._place.next_rank, group)
        assert sending is not None, "a rank sends in a group of its own"
        return sending

    def from_previous(self, x: torch.Tensor) -> torch.Tensor:
        """Replace `x` by what the same part of the stage before has sent, or the last stage to the first."""
        group = self._back if self._place.stage.is_first else self._onward
        torch.distributed.recv(x, self._place.previous_rank, group)
        return x

    def leave(self) -> None:
        """Close the connections to the other ranks."""
        torch.distributed.destroy_process_group()

    def _own_group(self, groups: Sequence[Sequence[int]]) -> torch.distributed.ProcessGroup:
        """Make all groups, as every rank has to at the same time, and return the one that has this rank."""
        made: list[torch.distributed.ProcessGroup] = [
            torch.distributed.new_group(list(ranks)) for ranks in groups
        ]
        return next(group for group, ranks in zip(made, groups, strict=True) if self._place.rank in ranks)

    def _meet(self) -> None:
        """Use every connection once."""
        one = torch.zeros(1, device=self.device)
        self.sum(one)
        if self._place.stage.count == 1:
            return
        if not self._place.stage.is_first:
            self.from_previous(one)
        sending = self.to_next(one)
        if self._place.stage.is_first:
            self.from_previous(torch.zeros_like(one))
        sending.wait()
        torch.distributed.all_reduce(one)
