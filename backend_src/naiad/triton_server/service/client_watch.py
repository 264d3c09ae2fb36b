"""Decides which clients to check for a disconnect, and when.

Triton does not notify a model that a client is gone. A stream that goes straight to its client is polled,
which is one IPC round trip. A stream that goes to a detokenizer is probed with an empty response: the
detokenizer's acknowledgement says whether the client is still connected, as it does for other chunks every
60 ms, so a probe is needed only if nothing has been sent for a while. A stream that has begun is given
longer, because each step brings it a token and steps with many sequences are long.

Both take time from the engine: on two busy cores about 1 ms for a probe and 0.1 ms for a poll, over all
processes. So each round checks a limited number of clients, those checked longest ago first: at most 400
probes and 1,600 polls a second, enough for 32 silent clients every 80 ms. Queued requests hold no blocks
yet, so they are checked less often: 20 checks a second for all of them, or one every two seconds for each,
and they take at most a quarter of a round. No client is checked twice within 60 ms, which finds each that
has gone within 100 ms, nor within one step of the engine, or within `LONGEST_S` if the step is longer,
because the engine ends a sequence only after a step.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Iterable

from naiad.outputs import EngineStats
from naiad.triton_server.responses.stream import ResponseStream

ROUND_S = 0.02
# Between rounds while there is no client to check; new work starts the next round early.
IDLE_ROUND_S = 0.5
CHECK_PERIOD_S = 0.06
STREAMING_PROBE_PERIOD_S = 0.6
LONGEST_S = 0.25
MAX_PROBES = 8
MAX_POLLS = 32
# Time between checks of queued clients, and the maximum time between two checks of the same one if rounds
# have room.
QUEUE_GAP_S = 0.05
LONGEST_IN_QUEUE_S = 2.0


class StepPace:
    """Measures how long the engine's steps currently take."""

    def __init__(self) -> None:
        """Start with steps that take no time, until the engine has reported some."""
        self._reported = EngineStats()
        self._reported_at_s = 0.0
        self._step_s = 0.0

    def take(self, stats: EngineStats, now_s: float) -> None:
        """Take the engine's latest stats."""
        num_steps = stats.total_steps - self._reported.total_steps
        if num_steps == 0:
            return
        had_work = self._reported.num_running + self._reported.num_waiting > 0
        # The interval before the first step after a pause, or after a restart, is not the time of a step.
        self._step_s = (now_s - self._reported_at_s) / num_steps if had_work and num_steps > 0 else 0.0
        self._reported, self._reported_at_s = stats, now_s

    @property
    def period_s(self) -> float:
        """Duration of the last step in seconds, at most `LONGEST_S`."""
        return min(self._step_s, LONGEST_S)


def streams_to_poll(
    streams: Collection[ResponseStream], now_s: float, step_s: float = 0.0
) -> list[ResponseStream]:
    """Choose up to `MAX_POLLS` streams without a detokenizer to poll now, those polled longest ago first.

    Args:
        streams: all open streams.
        now_s: time of the monotonic clock.
        step_s: minimum time between two checks of a client.
    """
    begun_s = max(step_s, CHECK_PERIOD_S)
    may_be_due = [
        stream for stream in streams if stream.wants_poll and now_s - stream.last_polled_s >= begun_s
    ]
    if not may_be_due:
        return []
    num_queued = _num_queued(streams)
    queue_s = max(begun_s, _queue_period_s(num_queued))
    due = [stream for stream in may_be_due if stream.has_begun or now_s - stream.last_polled_s >= queue_s]
    return _next(due, MAX_POLLS, num_queued, lambda stream: stream.last_polled_s)


def streams_to_probe(
    streams: Collection[ResponseStream], now_s: float, step_s: float = 0.0
) -> list[ResponseStream]:
    """Choose up to `MAX_PROBES` silent streams with a detokenizer to probe now; arguments as above."""
    may_be_due = [stream for stream in streams if now_s - stream.last_sent_s >= CHECK_PERIOD_S]
    if not may_be_due:
        return []
    num_queued = _num_queued(streams)
    due = [
        stream
        for stream in may_be_due
        if stream.wants_probe(now_s, max(_probe_period_s(stream, num_queued), step_s))
    ]
    return _next(due, MAX_PROBES, num_queued, lambda stream: stream.last_sent_s)


def _num_queued(streams: Iterable[ResponseStream]) -> int:
    return sum(not stream.has_begun for stream in streams)


def _queue_period_s(num_queued: int) -> float:
    return min(num_queued * QUEUE_GAP_S, LONGEST_IN_QUEUE_S)


def _probe_period_s(stream: ResponseStream, num_queued: int) -> float:
    if not stream.has_begun:
        return max(CHECK_PERIOD_S, _queue_period_s(num_queued))
    is_flowing = stream.request.streaming and stream.has_sent
    return STREAMING_PROBE_PERIOD_S if is_flowing else CHECK_PERIOD_S


def _next(
    due: Iterable[ResponseStream],
    limit: int,
    num_queued: int,
    asked_at_s: Callable[[ResponseStream], float],
) -> list[ResponseStream]:
    """Choose the streams checked longest ago; queued requests take at most a quarter of the places."""
    begun: list[ResponseStream] = []
    queued: list[ResponseStream] = []
    for stream in due:
        (begun if stream.has_begun else queued).append(stream)
    num_of_queue = max(1, math.ceil(num_queued * ROUND_S / LONGEST_IN_QUEUE_S))
    chosen = heapq.nsmallest(min(num_of_queue, limit // 4), queued, key=asked_at_s)
    return heapq.nsmallest(limit - len(chosen), begun, key=asked_at_s) + chosen
