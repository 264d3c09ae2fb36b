"""What a step costs by its number of tokens; measured, for those who decide whether drafts pay."""

from __future__ import annotations

from collections.abc import Callable

from naiad.model_runner.token_budget import best_seconds
from naiad.outputs import ScheduledSequence, SchedulerOutput
from naiad.sequence import SamplingParams, Sequence

_NUM_TOKENS = (1, 2, 4, 8, 16, 32, 64)
_CONTEXT_TOKENS = 256


def measure_step_costs(
    run: Callable[[SchedulerOutput], object], max_model_len: int, block_size: int
) -> list[tuple[int, float]]:
    """Seconds of steps in which one text goes on by a token and drafts.

    Args:
        run: computes a step; writes to `probed_blocks`.
        max_model_len: no longer is the text.
        block_size: tokens in a block.

    Returns:
        (tokens, seconds), fewest tokens first.
    """
    context = min(_CONTEXT_TOKENS, max_model_len)
    costs = []
    for num_tokens in (num for num in _NUM_TOKENS if num <= context):
        step = _verifying_step(context, num_tokens, block_size)
        costs.append((num_tokens, best_seconds(run, step)))
    return costs


def probed_blocks(max_model_len: int, block_size: int) -> list[int]:
    """The pool's blocks that are written to; clear them afterwards."""
    return list(range(-(-min(_CONTEXT_TOKENS, max_model_len) // block_size)))


def _verifying_step(context: int, num_tokens: int, block_size: int) -> SchedulerOutput:
    num_known = context - num_tokens + 1
    sequence = Sequence(
        sequence_id=-1,
        token_ids=[0] * num_known,
        num_prompt_tokens=num_known,
        params=SamplingParams(max_tokens=num_tokens),
        arrival_s=0.0,
        block_table=probed_blocks(context, block_size),
    )
    drafts = (0,) * (num_tokens - 1)
    return SchedulerOutput([ScheduledSequence(sequence, num_known - 1, num_tokens, True, drafts)])
