"""Random requests of all kinds for an engine with a real model runner, and what their clients receive."""

from __future__ import annotations

import random
from collections import defaultdict
from typing import Any

from helpers.engine_drive import CheckedScheduler
from naiad.config import EngineConfig
from naiad.engine import Engine
from naiad.engine.build import make_drafter, make_kv_cache
from naiad.model_runner import ModelRunner
from naiad.outputs import RequestOutput
from naiad.scheduler.step_budget import SchedulerLimits
from naiad.sequence import BeamParams, EngineRequest, SamplingParams
from naiad.speculation.policy import SpeculationPolicy
from naiad.speculation.speculator import Speculator
from naiad.speculation.step_cost import StepCost

_NUM_OPERATIONS = 90
Made = dict[int, list[RequestOutput]]

SETTINGS: list[dict[str, Any]] = [
    {},
    {"stop_token_ids": tuple(range(0, 90, 2))},
    {"temperature": 1.0},
    {"temperature": 1.3, "top_k": 20, "stop_token_ids": tuple(range(5, 50))},
    {"temperature": 0.8, "top_p": 0.9, "logit_bias": ((3, 2.0), (4, -1.0)), "num_log_probs": 2},
    {"temperature": 1.0, "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    {"bad_words": ((3,), (4, 5)), "returns_generation_logits": True},
    {"allowed_token_ids": (), "returns_context_logits": True, "max_tokens": 4},
]


def make_engine(config: EngineConfig, runner: ModelRunner, overlaps: bool) -> Engine:
    kv_cache = make_kv_cache(config, runner.kv_groups, 48)
    drafter = make_drafter(config, runner, kv_cache)
    # All steps cost the same, so all drafts are verified.
    policy = SpeculationPolicy(StepCost([(1, 1.0), (1 << 16, 1.0)]))
    speculator = None if config.drafter == "none" else Speculator(drafter, policy, 4)
    scheduler = CheckedScheduler(kv_cache, SchedulerLimits(6, 48), speculator=speculator)
    return Engine(scheduler, runner, clock=lambda: 0.0, overlaps=overlaps)


def traffic(engine: Engine, seed: int) -> Made:
    """Run random requests of all kinds, with aborts; return each sequence's outputs."""
    rng = random.Random(seed)
    prefixes = [[rng.randrange(90) for _ in range(50)] for _ in range(2)]
    made: Made = defaultdict(list)
    next_id = 0
    for _ in range(_NUM_OPERATIONS):
        roll = rng.random()
        if roll < 0.3:
            request = _request(rng, next_id, prefixes)
            next_id += len(request.sequence_ids)
            engine.add_request(request)
        elif roll < 0.34 and next_id:
            aborted = engine.abort(rng.randrange(next_id))
            if aborted is not None:
                made[aborted.sequence_id].append(aborted)
        else:
            for output in engine.step():
                made[output.sequence_id].append(output)
    while engine.has_work:
        for output in engine.step():
            made[output.sequence_id].append(output)
    assert engine.stats().num_used_blocks == 0
    assert len(made) == next_id
    return made


def _request(rng: random.Random, first_id: int, prefixes: list[list[int]]) -> EngineRequest:
    shared = rng.choice(prefixes)[: rng.randrange(50)]
    prompt = shared + [rng.randrange(90) for _ in range(rng.randint(1, 30))]
    settings = {"max_tokens": rng.randint(1, 25), "seed": rng.randrange(1 << 60)} | rng.choice(SETTINGS)
    num_siblings = rng.choice((0, 0, 0, 1, 2))
    params = SamplingParams(**settings)
    beam = None
    if num_siblings and rng.random() < 0.5:
        params = SamplingParams(max_tokens=rng.randint(1, 12))
        beam = BeamParams()
    return EngineRequest(
        sequence_id=first_id,
        prompt_token_ids=prompt,
        params=params,
        sibling_ids=tuple(range(first_id + 1, first_id + 1 + num_siblings)),
        beam=beam,
    )
