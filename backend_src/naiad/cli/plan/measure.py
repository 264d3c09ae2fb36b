"""Measures what steps cost on this CPU."""

from __future__ import annotations

from functools import partial

from naiad.cli.plan.steps import Measured
from naiad.config import EngineConfig
from naiad.model_runner import ModelRunner
from naiad.model_runner.lone_steps import LoneRow, lone_step
from naiad.model_runner.token_budget import best_seconds
from naiad.outputs import StepBatch
from naiad.sequence import SamplingParams

_BATCHES = (1, 2, 4, 8, 16, 32)
_SHORT, _LONG = 128, 640
_CHUNK = 256


def measured_costs(config: EngineConfig, max_num_seqs: int) -> tuple[Measured, ModelRunner]:
    """Load the model and time its steps, in processor time of the thread that computes.

    Args:
        config: of the engine.
        max_num_seqs: the largest batch that is of interest.

    Returns:
        The costs, and the runner that was timed.
    """
    runner = ModelRunner(config)
    batches = sorted({*(batch for batch in _BATCHES if batch < max_num_seqs), min(max_num_seqs, 64)})
    block_size = config.block_size
    make = partial(_decoding, block_size=block_size)
    longest = min(_LONG, runner.max_model_len)
    few = min(8, max_num_seqs)
    steps = [make(batch, _SHORT) for batch in batches]
    steps += [make(few, longest), _chunk(0, block_size), _chunk(longest - _CHUNK, block_size)]
    for step in steps:
        runner.run(step)
    *decode, long_s, chunk_s, late_s = best_seconds(runner.run, steps, is_cuda=False)
    short_s = Measured(list(zip(batches, decode, strict=True)), _SHORT, 0.0, 0.0, 0.0).decode_s(few, _SHORT)
    context_s = max(0.0, long_s - short_s) / (few * (longest - _SHORT))
    pair_s = max(0.0, late_s - chunk_s) / (_CHUNK * (longest - _CHUNK))
    token_s = max(0.0, chunk_s / _CHUNK - pair_s * _CHUNK / 2)
    return Measured(list(zip(batches, decode, strict=True)), _SHORT, context_s, token_s, pair_s), runner


def _decoding(batch: int, context: int, block_size: int) -> StepBatch:
    """A step in which each of a batch's sequences gets a token."""
    num_blocks = -(-context // block_size)
    params = SamplingParams(max_tokens=1)
    rows = [
        LoneRow(-1 - index, [0] * context, context - 1, _blocks(index, num_blocks), params)
        for index in range(batch)
    ]
    return lone_step(rows)


def _chunk(start: int, block_size: int) -> StepBatch:
    end = start + _CHUNK
    blocks = _blocks(0, -(-end // block_size))
    params = SamplingParams(max_tokens=1)
    return lone_step([LoneRow(-1, [0] * end, start, blocks, params, samples=False)])


def _blocks(index: int, number: int) -> list[int]:
    return list(range(index * number, (index + 1) * number))
