"""Lets large bodies in one at a time, and no faster than leaves the processor to the engine.

On a machine with few cores whoever sends one large body after the other would otherwise take a core from the
engine: to copy them from the network, to decode them and to count their tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable

# 64,000 tokens or more of a text.
LARGE_BYTES = 256 * 1024
# All large bodies together; 1 MB costs server and client 3 ms of a core.
_BYTES_PER_S = 32 * 1024 * 1024
# What follows a turn is a rest of this many times its length.
_REST = 2.0
_MAX_REST_S = 0.5

Sleep = Callable[[float], Awaitable[None]]


class LargeBodies:
    """The one lane of large bodies. Belongs to the event loop."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic, sleep: Sleep = asyncio.sleep) -> None:
        """Set up.

        Args:
            clock: the time in seconds.
            sleep: waits so many seconds.
        """
        self._clock = clock
        self._sleep = sleep
        self._free_s = clock()
        self._lane = asyncio.Semaphore(1)

    async def pace(self, num_bytes: int) -> None:
        """Wait so that all that is read keeps the rate. A client that sends slowly holds up nobody."""
        self._free_s = max(self._free_s, self._clock()) + num_bytes / _BYTES_PER_S
        await self._sleep(self._free_s - self._clock())

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for a turn, which lasts as long as the context; the next one begins after a rest."""
        await self._lane.acquire()
        began_s = self._clock()
        try:
            yield
        finally:
            rest_s = min(_REST * (self._clock() - began_s), _MAX_REST_S)
            asyncio.get_running_loop().call_later(rest_s, self._lane.release)
