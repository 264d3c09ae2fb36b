"""The threads that send responses. A stream always uses the same lane, so its responses stay in order."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

from naiad.triton_server.responses.stream import ResponseStream


class SenderPool:
    """Lanes that each have a thread and a queue of streams that may have something to send."""

    def __init__(self, num_threads: int, flush: Callable[[ResponseStream], None]) -> None:
        """Start the threads; `flush` sends what a stream may send, and never raises."""
        self._lanes = [_Lane(i, flush) for i in range(num_threads)]

    def send(self, streams: Sequence[ResponseStream]) -> None:
        """Flush a stream that comes alone in the calling thread, if its lane is idle; queue several.

        For a single response, waking a thread would take as much processor time as half of what else is done.
        """
        if len(streams) != 1 or not self._lane(streams[0]).flush_now(streams[0]):
            self.schedule(*streams)

    def schedule(self, *streams: ResponseStream) -> None:
        """Queue each stream in its lane; a thread is woken once for all of its streams."""
        shares: dict[_Lane, list[ResponseStream]] = {}
        for stream in streams:
            shares.setdefault(self._lane(stream), []).append(stream)
        for lane, share in shares.items():
            lane.queue.put(share)

    def close(self) -> None:
        """Flush the queued streams, then end the threads."""
        for lane in self._lanes:
            lane.queue.put(None)
        for lane in self._lanes:
            lane.thread.join(timeout=5)

    def _lane(self, stream: ResponseStream) -> _Lane:
        return self._lanes[stream.rows[0].sequence_id % len(self._lanes)]


class _Lane:
    """One thread and its queue; one thread at a time flushes its streams.

    Attributes:
        queue: streams to flush in its thread; None ends it.
        thread: flushes what is queued.
    """

    def __init__(self, number: int, flush: Callable[[ResponseStream], None]) -> None:
        """Start the thread."""
        self.queue: queue.SimpleQueue[list[ResponseStream] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name=f"naiad-sender-{number}", daemon=True)
        self._flush = flush
        self._is_flushing = threading.Lock()
        self.thread.start()

    def flush_now(self, stream: ResponseStream) -> bool:
        """Flush a stream in the calling thread; return False, without waiting, if another thread flushes."""
        if not self._is_flushing.acquire(blocking=False):
            return False
        try:
            self._flush(stream)
        finally:
            self._is_flushing.release()
        return True

    def _run(self) -> None:
        while (share := self.queue.get()) is not None:
            with self._is_flushing:
                for stream in share:
                    self._flush(stream)
