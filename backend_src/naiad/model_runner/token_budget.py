"""How much a step may compute so that it stays short; measured, because CPUs differ."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from naiad.model_runner.lone_steps import LoneRow, lone_step
from naiad.outputs import StepBatch
from naiad.sequence import SamplingParams

MIN_BUDGET_TOKENS = 32
MAX_BUDGET_TOKENS = 2048
# A step lies before a cancellation and before every stream's next token: below 250 ms.
_TARGET_STEP_S = 0.2
# Of the 32nd running text's token; measured 3.3 ms beside 1.7 ms for a token of a prompt.
_CPU_DECODE_COST = 2.0
_CHUNK_TOKENS = 128
_LONG_CONTEXT_TOKENS = 2048
_BUDGET_MULTIPLE = 16
_MAX_PROBES = 4
_PROBE_TIME_S = 1.5


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """What a step may compute.

    Attributes:
        num_tokens: of a step without context.
        context_cost: see `SchedulerLimits`.
        decode_cost: likewise.
    """

    num_tokens: int
    context_cost: float = 0.0
    decode_cost: float = 1.0


CUDA_BUDGET = TokenBudget(2048)


def probe_steps(max_model_len: int, block_size: int) -> tuple[StepBatch, StepBatch]:
    """A prompt's chunk alone and one at the end of a long context, over the pool's first blocks.

    Args:
        max_model_len: the longest context.
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
    """Tokens whose step takes 200 ms of processor time, a multiple of 16 in 32 … 2,048; what context adds.

    Args:
        run: computes a step; called once to warm up, then some times within three seconds.
        short: from `probe_steps`.
        long: likewise.
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
    """What each step takes when nothing disturbs it.

    Args:
        run: computes a step.
        steps: each is timed some times.
        is_cuda: whether a GPU computes. Else what counts is the processor time of this thread, which has
            its part in all that is computed: the server's other models start beside this one.
    """
    clock = time.perf_counter if is_cuda else time.thread_time
    # The best of several: another program's moment on the CPU must not shrink every later step. They
    # take turns, because it may last as long as all probes of one.
    best_s = [float("inf")] * len(steps)
    spent_s = [0.0] * len(steps)
    for _ in range(_MAX_PROBES):
        for index, step in enumerate(steps):
            if spent_s[index] > _PROBE_TIME_S:
                continue
            began_s, start_s = time.perf_counter(), clock()
            run(step)
            step_s, wall_s = clock() - start_s, time.perf_counter() - began_s
            # Some systems count a thread's time in ticks, of which a short step may see none.
            best_s[index] = min(best_s[index], step_s or wall_s)
            spent_s[index] += wall_s
    return best_s
