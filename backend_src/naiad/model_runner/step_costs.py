"""Measures the cost of a step by its number of tokens, to decide whether drafts pay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

from msgspec import Meta

from naiad.model_runner.lone_steps import LoneRow, lone_step
from naiad.model_runner.token_budget import best_seconds, probed_blocks
from naiad.outputs import StepBatch
from naiad.sequence import SamplingParams
from naiad.speculation.step_cost import StepCost

_NUM_TOKENS = (1, 2, 4, 8, 16, 32, 64)
_CONTEXT_TOKENS = 256
# On a GPU, reading the weights remains the bottleneck for more tokens.
_NUM_TOKENS_ON_CUDA = (*_NUM_TOKENS, 128, 256)
_NUM_DRAWN = 8
# The cost of a longer context is measured for the numbers of tokens that a row with drafts may have.
_WINDOWS = (1, 2, 4, 8, 16)
_LONG_CONTEXT_TOKENS = 2048
# Longer than any step takes, and short enough that sums and products of such times stay finite.
_MAX_STEP_S = 3600.0

_Tokens = Annotated[int, Meta(ge=1, le=_CONTEXT_TOKENS)]
_Seconds = Annotated[float, Meta(ge=0, le=_MAX_STEP_S)]


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """The costs of steps in which one sequence computes its last known token and drafts.

    What is kept of an earlier start is checked by these types and by `__post_init__`.

    Attributes:
        seconds: (tokens, seconds) with a short context, fewest tokens first.
        context: (tokens, seconds that each further token of context adds), fewest tokens first.
        num_context: number of tokens in the short context.
        drawn_s: additional seconds for each token that is drawn.
    """

    seconds: Annotated[list[tuple[_Tokens, Annotated[float, Meta(gt=0, le=_MAX_STEP_S)]]], Meta(min_length=1)]
    context: list[tuple[_Tokens, _Seconds]]
    num_context: _Tokens
    drawn_s: _Seconds

    def __post_init__(self) -> None:
        """Check the order.

        Raises:
            ValueError: a number of tokens is not greater than the one before it.
        """
        for name, costs in (("seconds", self.seconds), ("context", self.context)):
            tokens = [num_tokens for num_tokens, _ in costs]
            if any(one >= next_one for one, next_one in pairwise(tokens)):
                raise ValueError(f"{name} has costs of {tokens} tokens: expected ascending numbers")

    @property
    def step_cost(self) -> StepCost:
        """The function by which drafts are planned."""
        return StepCost(self.seconds, self.context, self.num_context, self.drawn_s)


def measure_step_costs(
    run: Callable[[StepBatch], object], max_model_len: int, block_size: int, *, is_cuda: bool
) -> MeasuredCosts:
    """Measure the cost of steps.

    Args:
        run: computes a step; writes to `probed_blocks`.
        max_model_len: maximum length of the sequence.
        block_size: tokens in a block.
        is_cuda: whether the steps run on a CUDA device.
    """
    short, long = (min(num, max_model_len) for num in (_CONTEXT_TOKENS, _LONG_CONTEXT_TOKENS))
    sizes = [num for num in (_NUM_TOKENS_ON_CUDA if is_cuda else _NUM_TOKENS) if num <= short]
    windows = _WINDOWS if long > short else ()
    num_drawn = max(num for num in sizes if num <= _NUM_DRAWN)
    steps = [_verifying_step(short, num, block_size) for num in sizes]
    steps += [_verifying_step(long, num, block_size) for num in windows]
    steps.append(_verifying_step(short, num_drawn, block_size, temperature=1.0))
    *measured, drawing_s = best_seconds(run, steps, is_cuda=is_cuda)
    seconds = dict(zip(sizes, measured[: len(sizes)], strict=True))
    context = [
        (num, max(0.0, long_s - seconds[num]) / (long - short))
        for num, long_s in zip(windows, measured[len(sizes) :], strict=True)
    ]
    drawn_s = max(0.0, drawing_s - seconds[num_drawn]) / num_drawn
    return MeasuredCosts(list(seconds.items()), context, short, drawn_s)


def _verifying_step(context: int, num_tokens: int, block_size: int, temperature: float = 0.0) -> StepBatch:
    num_known = context - num_tokens + 1
    params = SamplingParams(max_tokens=num_tokens, temperature=temperature)
    blocks = probed_blocks(context, block_size)
    drafts = (0,) * (num_tokens - 1)
    return lone_step([LoneRow(-1, [0] * num_known, num_known - 1, blocks, params, draft_token_ids=drafts)])
