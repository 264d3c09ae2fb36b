"""How many tokens a step may compute so that it stays short; measured, because CPUs differ."""

from __future__ import annotations

import time
from collections.abc import Callable

from naiad.outputs import ScheduledSequence, SchedulerOutput
from naiad.sequence import SamplingParams, Sequence

CUDA_BUDGET_TOKENS = 2048
MIN_BUDGET_TOKENS = 32
MAX_BUDGET_TOKENS = 2048
# A step waits behind a cancellation and before every stream's next token: well below 250 ms.
_TARGET_STEP_S = 0.2
_PROBE_TOKENS = 128
_PROBE_CONTEXT_TOKENS = 2048
_STEP_TOKENS = 16
_MAX_PROBES = 5
_PROBE_TIME_S = 3.0


def probe_step(max_model_len: int, block_size: int) -> SchedulerOutput:
    """A chunk at the end of a long context, over the pool's first blocks."""
    context = min(max_model_len, _PROBE_CONTEXT_TOKENS)
    num_tokens = min(_PROBE_TOKENS, context)
    sequence = Sequence(
        sequence_id=-1,
        token_ids=[0] * context,
        num_prompt_tokens=context,
        params=SamplingParams(max_tokens=1),
        arrival_s=0.0,
        block_table=list(range(-(-context // block_size))),
    )
    row = ScheduledSequence(sequence, context - num_tokens, num_tokens, samples=False)
    return SchedulerOutput([row])


def measure_token_budget(run: Callable[[SchedulerOutput], object], probe: SchedulerOutput) -> int:
    """Tokens whose step takes about 200 ms, a multiple of 16 in 32 … 2,048.

    Args:
        run: computes a step; called once to warm up, then up to five times within three seconds.
        probe: the step to measure.
    """
    run(probe)
    # The best of several: another program's moment on the CPU must not shrink every later step.
    best_s = float("inf")
    give_up_s = time.perf_counter() + _PROBE_TIME_S
    for _ in range(_MAX_PROBES):
        start_s = time.perf_counter()
        if start_s > give_up_s:
            break
        run(probe)
        best_s = min(best_s, time.perf_counter() - start_s)
    num_tokens = int(probe.num_scheduled_tokens * _TARGET_STEP_S / best_s)
    num_tokens -= num_tokens % _STEP_TOKENS
    return max(MIN_BUDGET_TOKENS, min(MAX_BUDGET_TOKENS, num_tokens))
