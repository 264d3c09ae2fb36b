"""Which clients are asked whether they are still there, and when.

Triton tells nobody that a client is gone. A stream that goes straight to its client is polled, an
IPC round trip. One with a detokenizer behind it is probed, a response through two models: the
acknowledgement says what the detokenizer sees of the client, as that of every other chunk does.
So a probe is needed only where nothing was sent for a while: for one that streams and has begun a
longer while, as each step brings it a token, and the steps of a crowd are long. Both cost time that
the engine would use: on two busy cores about 1 ms a probe and 0.1 ms a poll, all processes together.
So a round asks only so many clients, those first that have waited longest: 400 probes and 1,600 polls
a second at most, which is 32 silent clients each 80 ms. Those in the queue hold no blocks yet:
together they are asked 20 times a second, or each of them every two seconds, and take few of a round's
places. And nobody is asked again before the engine has made a step, after which it can end a sequence; of
steps longer than `LONGEST_S` so long at most.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Iterable

from naiad.outputs import EngineStats
from naiad.triton_server.responses.stream import ResponseStream

ROUND_S = 0.02
# Nobody is there to ask; what changes meanwhile brings a round of its own.
IDLE_ROUND_S = 0.5
PROBE_PERIOD_S = 0.06
STREAMING_PROBE_PERIOD_S = 0.6
LONGEST_S = 0.25
MAX_PROBES = 8
MAX_POLLS = 32
# Clients in the queue: between two questions, and the most for one of them if the rounds have room for all.
QUEUE_GAP_S = 0.05
LONGEST_IN_QUEUE_S = 2.0


class StepPace:
    """How long the engine's steps take now."""

    def __init__(self) -> None:
        """Nothing is known: as if they took no time."""
        self._told = EngineStats()
        self._told_at_s = 0.0
        self._step_s = 0.0

    def take(self, stats: EngineStats, now_s: float) -> None:
        """The engine said this."""
        num_steps = stats.total_steps - self._told.total_steps
        if num_steps == 0:
            return
        had_work = self._told.num_running + self._told.num_waiting > 0
        # What came behind a rest, or from an engine that was started again, tells nothing.
        self._step_s = (now_s - self._told_at_s) / num_steps if had_work and num_steps > 0 else 0.0
        self._told, self._told_at_s = stats, now_s

    @property
    def period_s(self) -> float:
        """Seconds of the last step, at most `LONGEST_S`."""
        return min(self._step_s, LONGEST_S)


def streams_to_poll(
    streams: Collection[ResponseStream], now_s: float, step_s: float = 0.0
) -> list[ResponseStream]:
    """Direct streams whose turn it is: the next `MAX_POLLS`, those first that were not asked for longest.

    Args:
        streams: all that are open.
        now_s: by the monotonic clock.
        step_s: nobody is asked more often.
    """
    num_queued = _num_queued(streams)
    queue_s = max(step_s, _queue_period_s(num_queued))
    due = [
        stream
        for stream in streams
        if stream.wants_poll and now_s - stream.last_polled_s >= (step_s if stream.has_begun else queue_s)
    ]
    return _next(due, MAX_POLLS, num_queued, lambda stream: stream.last_polled_s)


def streams_to_probe(
    streams: Collection[ResponseStream], now_s: float, step_s: float = 0.0
) -> list[ResponseStream]:
    """Silent streams before a detokenizer whose turn it is: the next `MAX_PROBES`; arguments as above."""
    num_queued = _num_queued(streams)
    due = [
        stream
        for stream in streams
        if stream.wants_probe(now_s, max(_probe_period_s(stream, num_queued), step_s))
    ]
    return _next(due, MAX_PROBES, num_queued, lambda stream: stream.last_sent_s)


def _num_queued(streams: Iterable[ResponseStream]) -> int:
    return sum(not stream.has_begun for stream in streams)


def _queue_period_s(num_queued: int) -> float:
    return min(num_queued * QUEUE_GAP_S, LONGEST_IN_QUEUE_S)


def _probe_period_s(stream: ResponseStream, num_queued: int) -> float:
    if not stream.has_begun:
        return max(PROBE_PERIOD_S, _queue_period_s(num_queued))
    is_flowing = stream.request.streaming and stream.has_sent
    return STREAMING_PROBE_PERIOD_S if is_flowing else PROBE_PERIOD_S


def _next(
    due: Iterable[ResponseStream],
    limit: int,
    num_queued: int,
    asked_at_s: Callable[[ResponseStream], float],
) -> list[ResponseStream]:
    """Streams of each kind, those asked longest ago first; at most a quarter of them are queued requests."""
    begun: list[ResponseStream] = []
    queued: list[ResponseStream] = []
    for stream in due:
        (begun if stream.has_begun else queued).append(stream)
    num_of_queue = max(1, math.ceil(num_queued * ROUND_S / LONGEST_IN_QUEUE_S))
    chosen = heapq.nsmallest(min(num_of_queue, limit // 4), queued, key=asked_at_s)
    return heapq.nsmallest(limit - len(chosen), begun, key=asked_at_s) + chosen
