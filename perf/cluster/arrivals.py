"""A recorded trace made as dense as many replicas need it."""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from perf.server.traces import TraceRequest

_FIRST_ID, _NUM_IDS = 1000, 48_000
_TRACE_BLOCK_TOKENS = 512
# Without a common divisor with their number.
_TURN_STEP = 7919


@dataclass(frozen=True, slots=True)
class Request:
    """A request to a router.

    Attributes:
        due_s: seconds from the start of the simulation.
        prompt: its token ids.
        num_tokens: how many are generated.
    """

    due_s: float
    prompt: Sequence[int]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Lengths:
    """How a trace's lengths are changed.

    Attributes:
        prompt_scale, output_scale: factors; at least one token remains.
        window_tokens: maximum length of prompt and output together.
    """

    prompt_scale: float
    output_scale: float
    window_tokens: int

    def of(self, request: TraceRequest) -> tuple[int, int]:
        """The tokens of a request's prompt and output."""
        num_output = min(max(1, round(request.output_tokens * self.output_scale)), self.window_tokens - 1)
        num_prompt = max(1, round(request.prompt_tokens * self.prompt_scale))
        return min(num_prompt, self.window_tokens - num_output), num_output


def dense_requests(
    trace: Sequence[TraceRequest], per_s: float, duration_s: float, lengths: Lengths
) -> list[Request]:
    """Let a trace's requests come so many a second.

    The trace is sped up. If it is too short for that, copies of it are laid over each other, each shifted and
    with prefixes of its own, so that a prefix is shared by as many requests as in the trace.

    Args:
        trace: the recorded requests.
        per_s: mean requests a second over the whole trace; parts of it are denser than others.
        duration_s: time over which they come.
        lengths: of prompts and outputs.

    Returns:
        The requests in the order in which they are due.
    """
    span_s = max(each.due_s for each in trace) * (1 + 1 / len(trace))
    num_copies = max(1, math.ceil(per_s * duration_s / len(trace)))
    speed = per_s * span_s / (num_copies * len(trace))
    made = []
    for copy in range(num_copies):
        for number, request in enumerate(trace):
            due_s = (request.due_s + copy * span_s / num_copies) % span_s / speed
            if due_s < duration_s:
                num_prompt, num_output = lengths.of(request)
                prompt = _prompt(request, f"{copy} {number}", copy, num_prompt, lengths.prompt_scale)
                made.append(Request(due_s, prompt, num_output))
    return sorted(made, key=lambda each: each.due_s)


def with_other_tokens(requests: Sequence[Request], turn: int) -> list[Request]:
    """Exchange all tokens of all prompts, so that no cache knows them from an earlier turn.

    Prefixes that were shared are shared.
    """
    step = turn * _TURN_STEP

    def exchanged(prompt: Sequence[int]) -> array[int]:
        return array("I", [(each - _FIRST_ID + step) % _NUM_IDS + _FIRST_ID for each in prompt])

    return [Request(each.due_s, exchanged(each.prompt), each.num_tokens) for each in requests]


def _prompt(request: TraceRequest, name: str, copy: int, num_tokens: int, scale: float) -> array[int]:
    """Random tokens, equal where the trace's blocks are equal."""
    block_tokens = _TRACE_BLOCK_TOKENS * scale
    prompt: array[int] = array("I")
    for index, block_id in enumerate(request.block_ids):
        num_new = min(round((index + 1) * block_tokens), num_tokens) - len(prompt)
        prompt.extend(_tokens(f"{copy} block {block_id}", num_new))
    prompt.extend(_tokens(f"request {name}", num_tokens - len(prompt)))
    return prompt


def _tokens(seed: str, num_tokens: int) -> array[int]:
    drawn = np.frombuffer(random.Random(seed).randbytes(4 * num_tokens), np.uint32)
    return array("I", (drawn % _NUM_IDS + _FIRST_ID).astype(np.uint32).tobytes())
