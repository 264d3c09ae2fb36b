"""A recorded trace made as dense as several replicas need it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from perf.server.open_loop import Arrival
from perf.server.traces import Scaling, TraceRequest, scaled_arrivals

_VOCAB_SIZE = 49152
# Block ids of a copy differ from those of another by a multiple of this.
_IDS_OF_COPY = 1 << 32


def dense_arrivals(
    trace: Sequence[TraceRequest],
    per_s: float,
    duration_s: float,
    *,
    prompt_scale: float,
    output_scale: float,
    window_tokens: int,
) -> list[Arrival]:
    """Let a trace's requests come so many a second.

    The trace is sped up. If it is too short for that, copies of it are laid over each other, each shifted
    and with prefixes of its own, so that a prefix is shared by as many requests as in the trace.

    Args:
        trace: the recorded requests.
        per_s: mean requests a second.
        duration_s: time over which they come.
        prompt_scale: factor of the prompts' lengths.
        output_scale: factor of the outputs' lengths.
        window_tokens: maximum length of prompt and output together.

    Returns:
        The requests in the order in which they are due.
    """
    span_s = max(each.due_s for each in trace) * (1 + 1 / len(trace))
    num_copies = max(1, math.ceil(per_s * duration_s / len(trace)))
    copied = [
        replace(
            each,
            due_s=(each.due_s + copy * span_s / num_copies) % span_s,
            block_ids=tuple(block_id + copy * _IDS_OF_COPY for block_id in each.block_ids),
        )
        for copy in range(num_copies)
        for each in trace
    ]
    speed = per_s * span_s / len(copied)
    scaling = Scaling(speed, prompt_scale, output_scale, 0.0, duration_s, window_tokens)
    arrivals, _ = scaled_arrivals(copied, scaling, _VOCAB_SIZE)
    return sorted(arrivals, key=lambda each: each.due_s)
