"""What a server that several tests share must be like after each of their tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import psutil

from helpers.server import Server, comes_to_nothing, gone
from naiad.cli.serve.shared_memory import mapped_regions

# Connections that clients leave open, and what a process opens when it first needs it.
MORE_DESCRIPTORS = 24


@dataclass(frozen=True, slots=True)
class Resting:
    """A server as it was before its first test.

    Attributes:
        server: the server.
        num_descriptors: process → its open descriptors.
        regions: names of the server's regions in /dev/shm.
    """

    server: Server
    num_descriptors: Mapping[psutil.Process, int]
    regions: set[str]

    @classmethod
    def of(cls, server: Server) -> Resting:
        """Look at a server that has just started."""
        first = psutil.Process(server.process.pid)
        num_descriptors = {each: each.num_fds() for each in [first, *first.children(recursive=True)]}
        return cls(server, num_descriptors, _regions(num_descriptors))

    def check(self) -> None:
        """Assert that it has come to rest, and that its processes live and hold no more than before."""
        assert not self.gone(), f"these processes have ended: {self.gone()}"
        self.server.rest()
        comes_to_nothing(self.grown)
        assert _regions(self.num_descriptors) == self.regions

    def gone(self) -> list[psutil.Process]:
        """The processes that have ended."""
        return [each for each in self.num_descriptors if gone([each])]

    def grown(self) -> dict[str, tuple[int, int]]:
        """Descriptors before and now of the processes that have many more."""
        now = {each: (before, each.num_fds()) for each, before in self.num_descriptors.items()}
        return {str(each): counts for each, counts in now.items() if counts[1] > counts[0] + MORE_DESCRIPTORS}


def _regions(processes: Mapping[psutil.Process, int]) -> set[str]:
    return mapped_regions([each.pid for each in processes])
