"""What a step costs by its number of tokens; measured, for those who decide whether drafts pay."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from naiad.model_runner.token_budget import best_seconds
from naiad.outputs import ScheduledSequence, SchedulerOutput
from naiad.sequence import SamplingParams, Sequence

_NUM_TOKENS = (1, 2, 4, 8, 16, 32, 64)
_CONTEXT_TOKENS = 256
# What a longer context adds is measured for as many tokens as a window of drafts may have.
_WINDOWS = (1, 2, 4, 8, 16)
_LONG_CONTEXT_TOKENS = 2048


class MeasuredCosts(NamedTuple):
    """Steps in which one text goes on by a token and drafts.

    Attributes:
        seconds: (tokens, seconds) with a short context, fewest tokens first.
        context: (tokens, seconds that each further token of context adds).
        num_context: tokens of the short one.
    """

    seconds: list[tuple[int, float]]
    context: list[tuple[int, float]]
    num_context: int


def measure_step_costs(
    run: Callable[[SchedulerOutput], object], max_model_len: int, block_size: int
) -> MeasuredCosts:
    """Time steps.

    Args:
        run: computes a step; writes to `probed_blocks`.
        max_model_len: no longer is the text.
        block_size: tokens in a block.
    """
    short, long = (min(num, max_model_len) for num in (_CONTEXT_TOKENS, _LONG_CONTEXT_TOKENS))
    seconds = {
        num: best_seconds(run, _verifying_step(short, num, block_size)) for num in _NUM_TOKENS if num <= short
    }
    context = []
    for num in _WINDOWS if long > short else ():
        added_s = best_seconds(run, _verifying_step(long, num, block_size)) - seconds[num]
        context.append((num, max(0.0, added_s) / (long - short)))
    return MeasuredCosts(list(seconds.items()), context, short)


def probed_blocks(max_model_len: int, block_size: int) -> list[int]:
    """The pool's blocks that are written to; clear them afterwards."""
    return list(range(-(-min(_LONG_CONTEXT_TOKENS, max_model_len) // block_size)))


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
