"""Traced streams whose last chunks the detokenizer has, and has not acknowledged yet."""

from __future__ import annotations

import threading
from collections.abc import Callable

from naiad.tracing.request_trace import RequestTrace
from naiad.triton_server.responses.stream import ResponseStream, StreamRow


class HandedOver:
    """Ends the trace of an answer when its client has it, which in an ensemble the detokenizer knows.

    A stream is forgotten as soon as its FINAL is sent; only its trace is kept here until the detokenizer has
    acknowledged every chunk. All methods may be called by any thread.
    """

    def __init__(self) -> None:
        """Wait for nothing."""
        self._lock = threading.Lock()
        self._streams: dict[int, tuple[ResponseStream, StreamRow]] = {}

    def end_trace(self, stream: ResponseStream, trace: RequestTrace) -> None:
        """End a closed stream's trace: now, or with the last acknowledgement that it waits for."""
        with self._lock:
            waits = stream.is_waiting_for_acks and stream.error is None and not stream.is_cancelling
            if waits:
                for row in stream.rows:
                    self._streams.update(dict.fromkeys(row.sequence_ids, (stream, row)))
        if not waits:
            trace.end()

    @property
    def is_waiting(self) -> bool:
        """Whether a trace waits for an acknowledgement."""
        return bool(self._streams)

    def acknowledge(self, sequence_id: int, num_chunks: int) -> None:
        """Take an acknowledgement for a stream that may be kept here."""
        with self._lock:
            found = self._streams.get(sequence_id)
        if found is not None:
            stream, row = found
            stream.acknowledge(row, num_chunks)
            self.acknowledged(stream)

    def acknowledged(self, stream: ResponseStream) -> None:
        """Take note that a stream, which may be kept here, has got an acknowledgement."""
        if not stream.is_waiting_for_acks:
            self._end(lambda each: each is stream)

    def end_before(self, time_s: float) -> None:
        """End the traces of streams that sent their last chunk before this time, by the monotonic clock."""
        self._end(lambda each: each.last_sent_s < time_s)

    def _end(self, is_meant: Callable[[ResponseStream], bool]) -> None:
        with self._lock:
            ended = {id(stream): stream for stream, _ in self._streams.values() if is_meant(stream)}
            self._streams = {key: place for key, place in self._streams.items() if id(place[0]) not in ended}
        for stream in ended.values():
            assert stream.trace is not None
            # If the detokenizer never answers, the answer ended with what was sent.
            stream.trace.end(stream.last_sent_s if stream.is_waiting_for_acks else None)
