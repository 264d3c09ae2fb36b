"""Measures how much of a step the GPU waits for the host."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from perf.engine.decode_steps import start_decoding
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from naiad.cli.bench.throughput import Prompts
from naiad.engine import Engine
from naiad.sequence import SamplingParams

_NUM_STEPS = 20


def waiting_share(engine: Engine, prompts: Prompts) -> float | None:
    """Measure the share of decode steps in which the GPU waits.

    It is an upper bound, because profiling slows the host down.

    Args:
        engine: an idle engine.
        prompts: prompts of sequences that are decoded; they leave room for some tokens.

    Returns:
        The share, from 0 to 1; None without a GPU.
    """
    sequence_ids = start_decoding(engine, prompts, SamplingParams(max_tokens=1 << 20))
    activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * torch.cuda.is_available()]
    with profile(activities=activities) as profiler:
        for _ in range(_NUM_STEPS):
            engine.step()
    for sequence_id in sequence_ids:
        engine.abort(sequence_id)
    return idle_share(device_spans(profiler.events()))


def device_spans(events: Iterable[Any]) -> list[tuple[float, float]]:
    """The (start, end) of a profile's events that are a GPU's, in microseconds."""
    # The profiler makes new objects of the enumeration, which are equal and not the same.
    return [
        (event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type == DeviceType.CUDA
    ]


def idle_share(spans: Iterable[tuple[float, float]]) -> float | None:
    """The share of the time from the first start to the last end that no span covers.

    Args:
        spans: (start, end) of each, in any order; spans may overlap.

    Returns:
        The share, from 0 to 1; None without spans.
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
