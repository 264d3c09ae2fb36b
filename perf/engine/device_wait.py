"""How much of a step a GPU waits for the host."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from naiad.cli.bench.throughput import Prompts
from naiad.engine import Engine
from naiad.sequence import EngineRequest, SamplingParams

_NUM_STEPS = 20
# No sequence has an id of these otherwise.
_FIRST_ID = 1 << 40


def waiting_share(engine: Engine, prompts: Prompts) -> float | None:
    """Of decode steps of all the prompts: an upper bound, because being watched slows the host down.

    Args:
        engine: idle.
        prompts: with room for some tokens behind them.

    Returns:
        From 0 to 1; None without a GPU.
    """
    ids = range(_FIRST_ID, _FIRST_ID + len(prompts))
    params = SamplingParams(max_tokens=1 << 20)
    for sequence_id, prompt in zip(ids, prompts, strict=True):
        engine.add_request(EngineRequest(sequence_id=sequence_id, prompt_token_ids=prompt, params=params))
    without_token = set(ids)
    while without_token:
        without_token -= {output.sequence_id for output in engine.step() if output.token_ids}
    activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * torch.cuda.is_available()]
    with profile(activities=activities) as profiler:
        for _ in range(_NUM_STEPS):
            engine.step()
    for sequence_id in ids:
        engine.abort(sequence_id)
    events = [event for event in profiler.events() if event.device_type is DeviceType.CUDA]
    return idle_share((event.time_range.start, event.time_range.end) for event in events)


def idle_share(spans: Iterable[tuple[float, float]]) -> float | None:
    """Of the time from the first begin to the last end, the part in no span; None without spans.

    Args:
        spans: begin and end of each, in any order, perhaps at the same time.
    """
    ordered = sorted(spans)
    if not ordered:
        return None
    first, reached = ordered[0]
    idle = 0.0
    for begin, end in ordered:
        idle += max(0.0, begin - reached)
        reached = max(reached, end)
    return idle / (reached - first)
