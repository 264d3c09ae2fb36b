"""The threads that send responses. A stream always uses the same thread, so its responses stay in order."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from naiad.triton_server.responses.stream import ResponseStream


class SenderPool:
    """Threads that each have a queue of streams that may have something to send."""

    def __init__(self, num_threads: int, flush: Callable[[ResponseStream], None]) -> None:
        """Start the threads; `flush` sends what a stream may send, and never raises."""
        self._queues: list[queue.SimpleQueue[list[ResponseStream] | None]] = [
            queue.SimpleQueue() for _ in range(num_threads)
        ]
        self._flush = flush
        self._threads = [
            threading.Thread(target=self._run, args=(each,), name=f"naiad-sender-{i}", daemon=True)
            for i, each in enumerate(self._queues)
        ]
        for thread in self._threads:
            thread.start()

    def schedule(self, *streams: ResponseStream) -> None:
        """Queue each stream in its thread; a thread is woken once for all of its streams."""
        shares: list[list[ResponseStream]] = [[] for _ in self._queues]
        for stream in streams:
            shares[stream.rows[0].sequence_id % len(shares)].append(stream)
        for each, share in zip(self._queues, shares, strict=True):
            if share:
                each.put(share)

    def close(self) -> None:
        """Flush the queued streams, then end the threads."""
        for each in self._queues:
            each.put(None)
        for thread in self._threads:
            thread.join(timeout=5)

    def _run(self, shares: queue.SimpleQueue[list[ResponseStream] | None]) -> None:
        while (share := shares.get()) is not None:
            for stream in share:
                self._flush(stream)
