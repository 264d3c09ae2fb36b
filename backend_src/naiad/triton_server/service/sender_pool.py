"""The threads that send responses. A stream always has the same one, so its order is kept."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from naiad.triton_server.responses.stream import ResponseStream


class SenderPool:
    """A few threads, each with a queue of streams that may have something to send."""

    def __init__(self, num_threads: int, flush: Callable[[ResponseStream], None]) -> None:
        """Start the threads; `flush` sends what a stream has, and never raises."""
        self._queues: list[queue.SimpleQueue[ResponseStream | None]] = [
            queue.SimpleQueue() for _ in range(num_threads)
        ]
        self._flush = flush
        self._threads = [
            threading.Thread(target=self._run, args=(each,), name=f"naiad-sender-{i}", daemon=True)
            for i, each in enumerate(self._queues)
        ]
        for thread in self._threads:
            thread.start()

    def schedule(self, stream: ResponseStream) -> None:
        """Have the stream's thread look at it soon."""
        self._queues[stream.rows[0].sequence_id % len(self._queues)].put(stream)

    def close(self) -> None:
        """Send what is queued, then end the threads."""
        for each in self._queues:
            each.put(None)
        for thread in self._threads:
            thread.join(timeout=5)

    def _run(self, streams: queue.SimpleQueue[ResponseStream | None]) -> None:
        while (stream := streams.get()) is not None:
            self._flush(stream)
