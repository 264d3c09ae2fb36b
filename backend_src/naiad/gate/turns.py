"""Turns of the event loop: work on messages is spread over them, so that other events come in between."""

from __future__ import annotations

import asyncio
from typing import Protocol

# Bytes of messages after which a turn is over. Each message counts a little more than it has.
TURN_BYTES = 256 << 10
_MESSAGE_BYTES = 1 << 10


class Worker(Protocol):
    """Who has work for a later turn."""

    def go_on(self) -> None:
        """Do a piece of it; `postpone` again if there is more."""


class Turns:
    """Counts the work of the current turn, and lets those who have more of it go on, one after the other."""

    def __init__(self) -> None:
        """Set up."""
        self._num_bytes = 0
        self._is_planned = False
        self._waiting: dict[Worker, None] = {}

    @property
    def is_over(self) -> bool:
        """Whether enough has been done in this turn."""
        return self._num_bytes >= TURN_BYTES

    def spend(self, num_bytes: int) -> None:
        """Count the work on a message of that size."""
        self._num_bytes += num_bytes + _MESSAGE_BYTES
        self._plan()

    def postpone(self, worker: Worker) -> None:
        """Let it go on in a later turn, behind those who wait already."""
        self._waiting[worker] = None
        self._plan()

    def forget(self, worker: Worker) -> None:
        """It has nothing to do any more."""
        self._waiting.pop(worker, None)

    def _plan(self) -> None:
        if not self._is_planned:
            self._is_planned = True
            asyncio.get_running_loop().call_soon(self._begin)

    def _begin(self) -> None:
        self._is_planned = False
        self._num_bytes = 0
        for worker in [*self._waiting]:
            if self.is_over:
                break
            if worker in self._waiting:
                del self._waiting[worker]
                worker.go_on()
        if self._waiting:
            self._plan()
