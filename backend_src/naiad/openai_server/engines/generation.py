"""One request on its way through an engine: deltas come in, and go out to the reader in the event loop."""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod

from naiad.errors import NaiadError
from naiad.openai_server.api.tally import SequenceDelta
from naiad.tracing.request_trace import RequestTrace


class Generation(ABC):
    """The sequences of one request. Any thread may call `add` and `fail`, the event loop the rest."""

    def __init__(self, num_sequences: int, trace: RequestTrace | None = None) -> None:
        """Start without deltas of any of the sequences; `trace` follows the request."""
        self.trace = trace
        self._lock = threading.Lock()  # guards what arrived and the sequences that have not ended
        self._arrived: list[SequenceDelta] = []
        self._failure: NaiadError | None = None
        self._open = set(range(num_sequences))
        self._has_begun = False
        self._is_nudged = False
        self._news = asyncio.Event()

    def add(self, delta: SequenceDelta) -> None:
        """Keep a delta for the reader."""
        with self._lock:
            self._has_begun = True
            self._arrived.append(delta)
            if delta.is_last:
                self._open.discard(delta.index)

    def fail(self, error: NaiadError) -> None:
        """End all sequences with this error."""
        with self._lock:
            self._open.clear()
            self._fail(error)

    def _fail(self, error: NaiadError) -> None:
        self._failure = self._failure or error
        if self.trace is not None:
            self.trace.fail(error.status, str(error))

    def wake(self) -> None:
        """Tell the waiting reader that something has arrived."""
        self._news.set()

    def nudge(self) -> None:
        """Make `next` return now."""
        self._is_nudged = True
        self._news.set()

    async def started(self, patience_s: float) -> None:
        """Wait until the engine has begun with it, or for this long: then it is admitted and waits its turn.

        Raises:
            NaiadError: the engine refused it.
        """
        while not self._has_begun and self._failure is None:
            try:
                await asyncio.wait_for(self._news.wait(), patience_s)
            except asyncio.TimeoutError:
                return
            self._news.clear()
        if not self._arrived and self._failure is not None:
            raise self._failure

    async def next(self) -> list[SequenceDelta]:
        """Wait until something arrives and return it; nothing after a `nudge`.

        Raises:
            NaiadError: the generation has failed; the deltas before it have been returned.
        """
        while True:
            with self._lock:
                arrived, self._arrived = self._arrived, []
                failure = self._failure
            if arrived or self._is_nudged:
                self._is_nudged = False
                return arrived
            if failure is not None:
                raise failure
            # `wake` runs in this event loop after what it reports has been stored, so none is missed.
            self._news.clear()
            await self._news.wait()

    @abstractmethod
    def close(self) -> None:
        """End the sequences that have not ended. To be called once, by the reader."""
