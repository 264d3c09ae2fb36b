"""What a load makes of one replica, and how many replicas it needs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from naiad.cli.plan.steps import StepCosts

_ROUNDS = 60


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that come independently of each other.

    Attributes:
        per_s: how many come in a second.
        prompt_tokens: of each.
        output_tokens: of each.
    """

    per_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Latency:
    """What a request meets on average.

    Attributes:
        running: sequences that run at the same time.
        first_token_s: time to the first token.
        inter_token_s: time between tokens.
        busy: the part of the time for which prompts are computed.
    """

    running: float
    first_token_s: float
    inter_token_s: float
    busy: float


def latency(costs: StepCosts, load: Load, max_running: float) -> Latency | None:
    """Return what a replica does with a load; None if it does not keep up.

    Every step decodes for c seconds and computes the prompts that came during the step before it, for p
    seconds each. If prompts take the part r of the time, a step takes c / (1 − r) on average, with the
    variance p r c / ((1 − r)(1 − r²)). By Little's law so many sequences run as come in a second, times how
    long each runs.

    Args:
        costs: of the replica's steps.
        load: what comes to it.
        max_running: sequences that it may run at the same time.
    """
    prompt_s = costs.prompt_s(load.prompt_tokens)
    busy = load.per_s * prompt_s
    if busy >= 1:
        return None
    context, num_gaps = load.prompt_tokens + load.output_tokens / 2, load.output_tokens - 1
    # How many of the steps before the first token's are followed by as many again, and so on.
    echoes = busy / (1 - busy) * (1 - busy**num_gaps)
    running = 0.0
    for _ in range(_ROUNDS):
        decode_s = costs.decode_s(max(1.0, running), context)
        step_s = decode_s / (1 - busy)
        # The step in which a request comes: a longer one is likelier, and there is none if nothing runs.
        met_s = (step_s + prompt_s * busy / (1 - busy**2)) * min(1.0, running + busy)
        own_s = decode_s + prompt_s + busy * met_s
        inter_token_s = step_s + max(0.0, own_s - step_s) * echoes / num_gaps
        running = load.per_s * num_gaps * inter_token_s
        if running > max_running:
            return None
    return Latency(running, met_s / 2 + own_s, inter_token_s, busy)


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request may meet on average; `math.inf`: anything."""

    first_token_s: float = math.inf
    inter_token_s: float = math.inf

    def allow(self, found: Latency | None) -> bool:
        """Whether a replica keeps up, within the limits."""
        return (
            found is not None
            and found.first_token_s <= self.first_token_s
            and found.inter_token_s <= self.inter_token_s
        )


def most_per_s(costs: StepCosts, load: Load, max_running: float, limits: Limits) -> float:
    """Return the most requests a second that one replica serves within the limits; 0: none."""

    def is_served(per_s: float) -> bool:
        part = Load(per_s, load.prompt_tokens, load.output_tokens)
        return limits.allow(latency(costs, part, max_running))

    low, high = 0.0, 1 / costs.prompt_s(load.prompt_tokens)
    if not is_served(high * 1e-6):
        return 0.0
    for _ in range(_ROUNDS):
        middle = (low + high) / 2
        low, high = (middle, high) if is_served(middle) else (low, middle)
    return low
