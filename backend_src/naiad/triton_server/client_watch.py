"""Which clients are asked whether they are still there, and when.

Triton tells nobody that a client is gone. A stream that goes straight to its client is polled, an
IPC round trip. One with a detokenizer behind it is probed, a response through two models: the
acknowledgement says what the detokenizer sees of the client, as that of every other chunk does.
So a probe is needed only where nothing was sent for a while: for one that streams and has begun a
longer while, as each step brings it a token, and the steps of a crowd are long. Both cost time that
the engine would use: on two busy cores about 1 ms a probe and 0.1 ms a poll, all processes together.
So a round asks only so many clients, those first that have waited longest: 400 probes and 1,600 polls
a second at most, which is 32 silent clients each 80 ms.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from naiad.triton_server.response_stream import ResponseStream

ROUND_S = 0.02
PROBE_PERIOD_S = 0.06
STREAMING_PROBE_PERIOD_S = 0.6
MAX_PROBES = 8
MAX_POLLS = 32
# Blocks are held by sequences that have begun, so their clients are asked more often in a crowd.
_BEGUN_WEIGHT = 4


def streams_to_poll(streams: Iterable[ResponseStream]) -> list[ResponseStream]:
    """Direct streams whose turn it is: the next `MAX_POLLS`, those first that were not asked for longest."""
    direct = [stream for stream in streams if stream.wants_poll]
    return heapq.nsmallest(MAX_POLLS, direct, key=lambda stream: stream.last_polled_s)


def streams_to_probe(streams: Iterable[ResponseStream], now_s: float) -> list[ResponseStream]:
    """Silent streams before a detokenizer whose turn it is: the next `MAX_PROBES`."""
    silent = [stream for stream in streams if stream.wants_probe(now_s, _period_s(stream))]
    return heapq.nlargest(MAX_PROBES, silent, key=lambda stream: _urgency(stream, now_s))


def _period_s(stream: ResponseStream) -> float:
    is_flowing = stream.request.streaming and stream.has_sent
    return STREAMING_PROBE_PERIOD_S if is_flowing else PROBE_PERIOD_S


def _urgency(stream: ResponseStream, now_s: float) -> float:
    return (now_s - stream.last_sent_s) * (_BEGUN_WEIGHT if stream.has_begun else 1)
