"""Chooses how many tokens a step may compute so that it stays short; measured, because CPUs differ."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from naiad.model_runner.lone_steps import LoneRow, lone_step
from naiad.outputs import StepBatch
from naiad.sequence import SamplingParams

MIN_BUDGET_TOKENS = 32
MAX_BUDGET_TOKENS = 2048
# A cancellation and every stream's next token wait for the current step: it should stay below 250 ms.
_TARGET_STEP_S = 0.2
# Measured with 32 running sequences: 3.3 ms for the next token of one, 1.7 ms for a prompt token.
_CPU_DECODE_COST = 2.0
_CHUNK_TOKENS = 128
_LONG_CONTEXT_TOKENS = 2048
_BUDGET_MULTIPLE = 16
_MAX_PROBES = 4
_PROBE_TIME_S = 1.5


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """The token budget of a step. What is kept of an earlier start is checked by these types.

    Their bounds are far from what a start measures, and near enough that arithmetic with it stays finite.

    Attributes:
        num_tokens: maximum number of tokens in a step without context.
        context_cost: the additional cost of a token for each token that it attends to; see
            `SchedulerLimits`.
        decode_cost: the cost of a running sequence's next token; see `SchedulerLimits`.
    """

    num_tokens: Annotated[int, Meta(ge=1, le=MAX_BUDGET_TOKENS)]
    context_cost: Annotated[float, Meta(ge=0, le=1)] = 0.0
    decode_cost: Annotated[float, Meta(ge=1, le=MAX_BUDGET_TOKENS)] = 1.0


CUDA_BUDGET = TokenBudget(2048)


def probe_steps(max_model_len: int, block_size: int) -> tuple[StepBatch, StepBatch]:
    """Make a step with a prompt chunk alone, and one with a chunk at the end of a long context.

    Both use the pool's first blocks.

    Args:
        max_model_len: maximum length of the context.
        block_size: tokens in a block.
    """
    short = _probe_step(min(_CHUNK_TOKENS, max_model_len), block_size)
    return short, _probe_step(min(_LONG_CONTEXT_TOKENS, max_model_len), block_size)


def _probe_step(context: int, block_size: int) -> StepBatch:
    num_tokens = min(_CHUNK_TOKENS, context)
    blocks = probed_blocks(context, block_size)
    params = SamplingParams(max_tokens=1)
    return lone_step([LoneRow(-1, [0] * context, context - num_tokens, blocks, params, samples=False)])


def probed_blocks(max_model_len: int, block_size: int) -> list[int]:
    """The pool's blocks that probes write to; clear them afterwards."""
    return list(range(-(-min(_LONG_CONTEXT_TOKENS, max_model_len) // block_size)))


def measure_token_budget(
    run: Callable[[StepBatch], object], short: StepBatch, long: StepBatch
) -> TokenBudget:
    """Measure how many tokens take 200 ms of CPU time, and what context adds.

    The number of tokens is rounded down to a multiple of 16 and clamped to 32 … 2,048.

    Args:
        run: computes a step; called once to warm up, then several times within about three seconds.
        short: the first step of `probe_steps`.
        long: the second step of `probe_steps`.
    """
    run(short)
    short_s, long_s = best_seconds(run, [short, long], is_cuda=False)
    token_s = short_s / short.num_scheduled_tokens
    num_tokens = int(_TARGET_STEP_S / token_s)
    num_tokens -= num_tokens % _BUDGET_MULTIPLE
    num_pairs = long.num_scheduled_tokens * (_context(long) - _context(short))
    pair_s = max(0.0, long_s - short_s) / num_pairs if num_pairs else 0.0
    num_tokens = max(MIN_BUDGET_TOKENS, min(MAX_BUDGET_TOKENS, num_tokens))
    return TokenBudget(num_tokens, pair_s / token_s, _CPU_DECODE_COST)


def _context(step: StepBatch) -> int:
    return step.rows[0].known_end


def best_seconds(run: Callable[[StepBatch], object], steps: list[StepBatch], *, is_cuda: bool) -> list[float]:
    """The duration of each step when nothing disturbs it, in seconds.

    Args:
        run: computes a step.
        steps: each is timed several times.
        is_cuda: whether a GPU computes. Otherwise this thread's CPU time is measured, because the
            server's other models start at the same time; the thread takes part in all computation.
    """
    clock = time.perf_counter if is_cuda else time.thread_time
    # The best of several measurements counts: a short disturbance by another program must not shrink every
    # later step. Steps take turns, because a disturbance may last as long as all measurements of one.
    best_s = [float("inf")] * len(steps)
    spent_s = [0.0] * len(steps)
    for _ in range(_MAX_PROBES):
        for index, step in enumerate(steps):
            if spent_s[index] > _PROBE_TIME_S:
                continue
            began_s, start_s = time.perf_counter(), clock()
            run(step)
            step_s, wall_s = clock() - start_s, time.perf_counter() - began_s
            # Some systems count a thread's time in ticks; a short step may take none.
            best_s[index] = min(best_s[index], step_s or wall_s)
            spent_s[index] += wall_s
    return best_s
