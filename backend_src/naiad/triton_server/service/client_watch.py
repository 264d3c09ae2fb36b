"""Which clients are asked whether they are still there, and when.

Triton does not report that a client is gone. A stream that goes straight to its client is polled, which is
one IPC round trip. A stream before a detokenizer is probed with an empty response through both models: the
detokenizer's acknowledgement says whether its client is still connected, as it does for every other chunk.
So a probe is needed only where nothing was sent for a while. A stream that has begun is given longer,
because each step brings it a token and the steps of many sequences are long.

Both cost time that the engine could use: on two busy cores about 1 ms a probe and 0.1 ms a poll, over all
processes. So a round asks a limited number of clients, those first that were asked longest ago: at most 400
probes and 1,600 polls a second, which is 32 silent clients every 80 ms. Requests in the queue hold no blocks
yet: together they are asked 20 times a second, or each of them every two seconds, and take few of a round's
places. No client is asked twice within one step of the engine, or within `LONGEST_S` if the step is longer,
because the engine ends a sequence only after a step.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Iterable

from naiad.outputs import EngineStats
from naiad.triton_server.responses.stream import ResponseStream

ROUND_S = 0.02
# While there is no client to ask; a change brings the next round early.
IDLE_ROUND_S = 0.5
PROBE_PERIOD_S = 0.06
STREAMING_PROBE_PERIOD_S = 0.6
LONGEST_S = 0.25
MAX_PROBES = 8
MAX_POLLS = 32
# Between two questions to queued clients, and at most between two to the same one if rounds have room.
QUEUE_GAP_S = 0.05
LONGEST_IN_QUEUE_S = 2.0


class StepPace:
    """How long the engine's steps take now."""

    def __init__(self) -> None:
        """Assume that steps take no time until the engine has reported some."""
        self._reported = EngineStats()
        self._reported_at_s = 0.0
        self._step_s = 0.0

    def take(self, stats: EngineStats, now_s: float) -> None:
        """Take the engine's latest report."""
        num_steps = stats.total_steps - self._reported.total_steps
        if num_steps == 0:
            return
        had_work = self._reported.num_running + self._reported.num_waiting > 0
        # The first step after a pause, or of a restarted engine, says nothing about the pace.
        self._step_s = (now_s - self._reported_at_s) / num_steps if had_work and num_steps > 0 else 0.0
        self._reported, self._reported_at_s = stats, now_s

    @property
    def period_s(self) -> float:
        """Seconds of the last step, at most `LONGEST_S`."""
        return min(self._step_s, LONGEST_S)


def streams_to_poll(
    streams: Collection[ResponseStream], now_s: float, step_s: float = 0.0
) -> list[ResponseStream]:
    """The streams without a detokenizer to poll now: at most `MAX_POLLS`, those asked longest ago first.

    Args:
        streams: all that are open.
        now_s: by the monotonic clock.
        step_s: no client is asked twice within this time.
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
    """The silent streams before a detokenizer to probe now: at most `MAX_PROBES`; arguments as above."""
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
    """The streams that were asked longest ago; queued requests take at most a quarter of the places."""
    begun: list[ResponseStream] = []
    queued: list[ResponseStream] = []
    for stream in due:
        (begun if stream.has_begun else queued).append(stream)
    num_of_queue = max(1, math.ceil(num_queued * ROUND_S / LONGEST_IN_QUEUE_S))
    chosen = heapq.nsmallest(min(num_of_queue, limit // 4), queued, key=asked_at_s)
    return heapq.nsmallest(limit - len(chosen), begun, key=asked_at_s) + chosen
