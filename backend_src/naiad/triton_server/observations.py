"""Latencies as the senders saw them, kept until the housekeeping thread writes them to metrics."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from naiad.triton_server.response_stream import ResponseStream


@dataclass(slots=True)
class LatencyBatch:
    """Seconds from arrival to first token, and between tokens (one entry a token)."""

    first_token_s: list[float] = field(default_factory=list)
    inter_token_s: list[float] = field(default_factory=list)


class Observations:
    """Filled by several threads, emptied by one."""

    def __init__(self) -> None:
        """Start empty."""
        self._lock = threading.Lock()
        self._batch = LatencyBatch()

    def add_tokens(self, stream: ResponseStream, num_tokens: int, previous_s: float | None) -> None:
        """A stream has just sent this many tokens; `previous_s` is when it last had."""
        if not num_tokens or stream.last_token_s is None:
            return
        with self._lock:
            if previous_s is None:
                self._batch.first_token_s.append(stream.last_token_s - stream.arrival_s)
            else:
                each_s = (stream.last_token_s - previous_s) / num_tokens
                self._batch.inter_token_s.extend([each_s] * num_tokens)

    def take(self) -> LatencyBatch:
        """What came since the last call."""
        with self._lock:
            taken, self._batch = self._batch, LatencyBatch()
        return taken
