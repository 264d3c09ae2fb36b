"""Ranks of a split model that are threads of one process."""

from __future__ import annotations

import threading

import torch


class ThreadGroup:
    """Ranks that are threads of this process, with the methods of `RankGroup`."""

    def __init__(self, size: int, takes_turns: bool = False) -> None:
        """`takes_turns`: only who has `turn` computes; it is given up while others are waited for."""
        self.turn = threading.Lock()
        self._takes_turns = takes_turns
        self._barrier = threading.Barrier(size)
        self._given: list[torch.Tensor] = [torch.empty(0)] * size
        self._size = size

    def of(self, rank: int) -> RankOfThread:
        return RankOfThread(self, rank)

    def exchange(self, rank: int, x: torch.Tensor) -> list[torch.Tensor]:
        self._given[rank] = x.clone()
        if self._takes_turns:
            self.turn.release()
        try:
            self._barrier.wait(60)
            given = list(self._given)
            self._barrier.wait(60)
        finally:
            if self._takes_turns:
                self.turn.acquire()
        return given

    def abort(self) -> None:
        self._barrier.abort()


class RankOfThread:
    device = torch.device("cpu")

    def __init__(self, group: ThreadGroup, rank: int) -> None:
        self._group = group
        self._rank = rank

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(torch.stack(self._group.exchange(self._rank, x)).sum(dim=0))

    def joined(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._group.exchange(self._rank, x), dim=1)

    def from_first(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(self._group.exchange(self._rank, x)[0])

    def joined_at_first(self, x: torch.Tensor, count: int) -> torch.Tensor:
        joined = self.joined(x)
        return x.new_empty(0, count) if self._rank else joined
