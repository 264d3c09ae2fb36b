"""A part of a recorded trace, at whatever rate a machine can serve."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from perf.common.report import ROOT
from perf.server.open_loop import Arrival
from perf.server.traces import Scaling, TraceRequest, read_trace, scaled_arrivals

LENGTH_SCALE = 0.25
_TRACE = ROOT / "perf" / "data" / "azure_llm_2023_conversation_10min.csv"
# The trace's first requests come at a lower rate than the others.
_START_S = 30.0
_WINDOW_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class TracePart:
    """Consecutive requests of a trace, due from 0 on.

    Attributes:
        requests: as they were recorded.
        vocab_size: prompts are random ids below it.
        window_tokens: maximum length of a scaled prompt and output together.
    """

    requests: Sequence[TraceRequest]
    vocab_size: int
    window_tokens: int

    def arrivals(self, per_s: float) -> list[Arrival]:
        """Scale lengths, and times so that requests come at this mean rate; infinite: all at once."""
        return self._scaled(per_s)[0]

    @property
    def num_clipped(self) -> int:
        """How many requests are clipped to the window."""
        return self._scaled(math.inf)[1]

    def _scaled(self, per_s: float) -> tuple[list[Arrival], int]:
        recorded = (len(self.requests) - 1) / self.requests[-1].due_s
        scaling = Scaling(
            speed=per_s / recorded,
            prompt_scale=LENGTH_SCALE,
            output_scale=LENGTH_SCALE,
            start_s=0.0,
            duration_s=math.inf,
            window_tokens=self.window_tokens,
        )
        return scaled_arrivals(self.requests, scaling, self.vocab_size)


def read_part(num_requests: int, vocab_size: int, max_length: int, path: Path = _TRACE) -> TracePart:
    """Read the requests that are replayed.

    Args:
        num_requests: at least 2.
        vocab_size: of the model.
        max_length: maximum prompt + new tokens that contestants take; longer requests are clipped.
        path: the trace.
    """
    listed = [each for each in read_trace(path) if each.due_s >= _START_S][:num_requests]
    begun = [replace(each, due_s=each.due_s - listed[0].due_s) for each in listed]
    return TracePart(begun, vocab_size, min(_WINDOW_TOKENS, max_length))
