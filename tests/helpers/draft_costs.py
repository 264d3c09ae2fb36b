"""Step costs of several shapes, and the gain from drafts with them."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from naiad.speculation.policy import AcceptanceState
from naiad.speculation.step_cost import StepCost

FLAT = StepCost([(1, 1.0), (100_000, 1.0)])
# As on a CPU: a window of 8 costs 1.35 times a single token.
GENTLE = StepCost([(1, 1.0), (8, 1.35), (64, 4.15)])
PROPORTIONAL = StepCost([(1, 1.0)])

COSTS = st.lists(
    st.tuples(st.integers(1, 20), st.floats(0.1, 10)), min_size=1, max_size=6, unique_by=lambda each: each[0]
).map(lambda measured: StepCost(sorted(measured)))
RATES = st.floats(0.01, 0.99)


def state_with(rate: float) -> AcceptanceState:
    return AcceptanceState(num_judged=100.0, num_accepted=100.0 * rate)


def seconds(cost: StepCost, num_tokens: int) -> float:
    return float(cost(np.array(num_tokens)))


def outputs_per_second(
    cost: StepCost, rates: list[float], counts: tuple[int, ...] | list[int], num_step_tokens: int
) -> float:
    outputs = sum(rate**place for rate, num in zip(rates, counts, strict=True) for place in range(num + 1))
    added_s = seconds(cost, num_step_tokens + sum(counts)) - seconds(cost, num_step_tokens)
    return outputs / (seconds(cost, len(rates)) + added_s)
