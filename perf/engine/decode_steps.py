"""Brings an engine to the point where each of its steps decodes one token of every prompt."""

from __future__ import annotations

from naiad.cli.bench.throughput import Prompts
from naiad.engine import Engine
from naiad.sequence import EngineRequest, SamplingParams

NUM_WARM_UP_STEPS = 5


def start_decoding(engine: Engine, prompts: Prompts, params: SamplingParams) -> range:
    """Add a request for each prompt, compute all prompts and run `NUM_WARM_UP_STEPS` decode steps.

    Returns:
        The sequences' ids, all negative.
    """
    sequence_ids = range(-1, -1 - len(prompts), -1)
    for sequence_id, prompt in zip(sequence_ids, prompts, strict=True):
        engine.add_request(EngineRequest(sequence_id=sequence_id, prompt_token_ids=prompt, params=params))
    waiting = set(sequence_ids)
    while waiting:
        waiting -= {output.sequence_id for output in engine.step() if output.token_ids}
    for _ in range(NUM_WARM_UP_STEPS):
        engine.step()
    return sequence_ids
