"""A recorded stretch of traffic with real texts, computed by an engine in this process."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from perf.server.open_loop import Arrival
from perf.server.trace_part import TracePart

from naiad.engine import Engine
from naiad.sequence import EngineRequest, SamplingParams

_SHORTEST_PROMPT = 16


def with_texts(
    part: TracePart, texts: Sequence[str], encode: Callable[[str], list[int]], per_s: float
) -> list[Arrival]:
    """The requests of a trace at this mean rate, each with a text in the place of its random prompt.

    Args:
        part: of the trace, which records lengths and times but no texts.
        texts: what users write, in turns; each is cut to about the recorded length.
        encode: returns the prompt of what a user writes.
        per_s: requests that come in a second.
    """
    arrivals = []
    for number, each in enumerate(part.arrivals(per_s)):
        text = texts[number % len(texts)]
        length = max(_SHORTEST_PROMPT, len(each.prompt_token_ids))
        share = min(1.0, length / len(encode(text)))
        arrivals.append(replace(each, prompt_token_ids=encode(text[: round(len(text) * share)])))
    return arrivals


def compute(engine: Engine, arrivals: Sequence[Arrival]) -> tuple[list[list[int]], float]:
    """Compute requests as they come; return the tokens, and the seconds in which the engine had work.

    Every request is a tenant of its own, so that no drafter has seen the same answer before.
    """
    eos = engine.model_config.eos_token_ids
    made: list[list[int]] = [[] for _ in arrivals]
    start_s, busy_s, num_added = time.perf_counter(), 0.0, 0
    while num_added < len(arrivals) or engine.has_work:
        now_s = time.perf_counter() - start_s
        while num_added < len(arrivals) and arrivals[num_added].due_s <= now_s:
            each = arrivals[num_added]
            request = EngineRequest(
                sequence_id=num_added,
                prompt_token_ids=each.prompt_token_ids,
                params=SamplingParams(max_tokens=each.num_tokens, stop_token_ids=eos),
                cache_salt=secrets.token_hex(8),
            )
            engine.add_request(request)
            num_added += 1
        if not engine.has_work:
            time.sleep(arrivals[num_added].due_s - now_s)
            continue
        begun_s = time.perf_counter()
        for output in engine.step():
            made[output.sequence_id] += output.token_ids
        busy_s += time.perf_counter() - begun_s
    return made, busy_s
