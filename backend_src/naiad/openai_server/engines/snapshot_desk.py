"""Asks one model's engine what it is doing, once for everybody who wants to know."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass

from naiad.engine_process import AttachedClient, Ready
from naiad.engine_process.protocol import SnapshotTaken
from naiad.errors import EngineAwayError
from naiad.snapshot import EngineSnapshot

# An answer that is not older serves the next who asks, too.
_FRESH_S = 0.3
_LOOK_S = 0.2


@dataclass(frozen=True, slots=True)
class NamedSnapshot:
    """What an engine is doing.

    Attributes:
        info: the engine's description of itself.
        snapshot: its answer.
        request_ids: the engine's id of a sequence → the id of its request, for requests of this server.
        taken_s: when it came, on the event loop's clock.
    """

    info: Ready
    snapshot: EngineSnapshot
    request_ids: Mapping[int, str]
    taken_s: float


class SnapshotDesk:
    """Belongs to the event loop."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, pool: Executor, name_of: Callable[[int], str | None]
    ) -> None:
        """Set up; `client` has to be set before anybody asks.

        Args:
            loop: the event loop.
            pool: runs what would hold it up.
            name_of: the name of one of this server's sequences; None if it is not known any more.
        """
        self.client: AttachedClient | None = None
        self._loop = loop
        self._pool = pool
        self._name_of = name_of
        self._news = asyncio.Event()
        self._answer: SnapshotTaken | None = None
        self._last: NamedSnapshot | None = None
        self._asking: asyncio.Task[NamedSnapshot] | None = None

    def take(self, answer: SnapshotTaken) -> None:
        """Take the engine's answer; may be called from any thread."""
        self._loop.call_soon_threadsafe(self._arrive, answer)

    async def get(self) -> NamedSnapshot:
        """Return what the engine is doing; those who ask at the same time share one question.

        Raises:
            EngineAwayError: no engine serves, or it was lost before it answered.
            UnavailableError: the engine is too old to tell.
        """
        last = self._last
        if last is not None and self._loop.time() - last.taken_s < _FRESH_S:
            return last
        if self._asking is None or self._asking.done():
            self._asking = self._loop.create_task(self._ask())
        return await asyncio.shield(self._asking)

    async def _ask(self) -> NamedSnapshot:
        assert self.client is not None
        self._last = self._answer = None
        self._news.clear()
        # An engine that does not read would hold up the event loop.
        info = await self._loop.run_in_executor(self._pool, self.client.ask_snapshot)
        # The engine answers between two steps.
        while self._answer is None:
            try:
                await asyncio.wait_for(self._news.wait(), _LOOK_S)
            except asyncio.TimeoutError:
                if self.client.info is not info:
                    raise EngineAwayError(
                        "the model does not serve now; try again in a few seconds"
                    ) from None
        names = {each: self._name_of(own_id) for each, own_id in self._answer.own_ids.items()}
        request_ids = {each: name for each, name in names.items() if name is not None}
        self._last = NamedSnapshot(info, self._answer.snapshot, request_ids, self._loop.time())
        return self._last

    def _arrive(self, answer: SnapshotTaken) -> None:
        self._answer = answer
        self._news.set()
