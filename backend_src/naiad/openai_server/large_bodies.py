"""Lets large bodies in one at a time, no faster than leaves the processor to the engine, and not too many.

On a machine with few cores whoever sends one large body after the other would otherwise take a core from the
engine: to copy them from the network, to decode them and to count their tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

# 64,000 tokens or more of a text.
LARGE_BYTES = 256 * 1024
# All large bodies together; 1 MB costs server and client 3 ms of a core.
_BYTES_PER_S = 32 * 1024 * 1024
# What is held of all bodies that come or wait for their turn, beyond `LARGE_BYTES` of each.
_MAX_HELD_BYTES = 256 * 1024 * 1024
# What follows a turn is a rest of this many times its length.
_REST = 2.0
_MAX_REST_S = 0.5

Sleep = Callable[[float], Awaitable[None]]


class NoRoomError(Exception):
    """Too much of other bodies is held."""


class HeldBody:
    """What has come of a body.

    Attributes:
        data: its bytes.
    """

    def __init__(self, hold: Callable[[int], None]) -> None:
        """Set up; `hold` counts bytes that are held, fewer of them with a negative number."""
        self._hold = hold
        self.data = bytearray()

    def add(self, part: bytes) -> None:
        """Take the next part. Small bodies always have room: the connections bound them.

        Raises:
            NoRoomError: too much of other bodies is held.
        """
        num_bytes = len(self.data)
        self._hold(_num_counted(num_bytes + len(part)) - _num_counted(num_bytes))
        self.data += part

    def drop(self) -> None:
        """Hold nothing any more.

        The error of a client that leaves, and the frames that it has passed, refer to each other, so that
        they stay until the garbage is collected; but not what they have read.
        """
        self._hold(-_num_counted(len(self.data)))
        self.data = bytearray()


def _num_counted(num_bytes: int) -> int:
    return max(0, num_bytes - LARGE_BYTES)


class LargeBodies:
    """The room for bodies, and the one lane of large ones. Belongs to the event loop."""

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Sleep = asyncio.sleep,
        max_held_bytes: int = _MAX_HELD_BYTES,
    ) -> None:
        """Set up.

        Args:
            clock: the time in seconds.
            sleep: waits so many seconds.
            max_held_bytes: what may be held of all bodies.
        """
        self._max_held_bytes = max_held_bytes
        self._num_held_bytes = 0
        self._clock = clock
        self._sleep = sleep
        self._free_s = clock()
        self._lane = asyncio.Semaphore(1)

    @contextlib.contextmanager
    def room(self) -> Iterator[HeldBody]:
        """Hold a body as long as the context lasts."""
        body = HeldBody(self._hold)
        try:
            yield body
        finally:
            body.drop()

    def _hold(self, num_bytes: int) -> None:
        if num_bytes > self._max_held_bytes - self._num_held_bytes:
            raise NoRoomError
        self._num_held_bytes += num_bytes

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
