"""A recorded stretch of traffic with real texts, computed by an engine in this process."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from perf.common.report import ROOT
from perf.server.traces import read_trace

from naiad.engine import Engine
from naiad.sequence import EngineRequest, SamplingParams

# Lengths and arrivals; the trace holds no texts.
_TRACE = ROOT / "perf" / "data" / "azure_llm_2023_conversation_10min.csv"
# The trace's first requests come at a lower rate than the others.
_START_S = 30.0
_LENGTH_SCALE = 0.25
_SHORTEST_PROMPT = 16


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """When a request comes, in seconds after the first, its prompt, and how many tokens it may get."""

    due_s: float
    prompt: list[int]
    max_tokens: int


def traced_requests(
    texts: Sequence[str], encode: Callable[[str], list[int]], num_requests: int, per_s: float
) -> list[TracedRequest]:
    """Give texts to requests of the trace, with a quarter of their lengths, so many a second on average.

    Args:
        texts: what users write, in turns; each is cut to about the recorded length.
        encode: returns the prompt of what a user writes.
        num_requests: of the trace.
        per_s: requests that come in a second.
    """
    recorded = [each for each in read_trace(_TRACE) if each.due_s >= _START_S][:num_requests]
    speed = per_s * (recorded[-1].due_s - recorded[0].due_s) / max(1, len(recorded) - 1)
    requests = []
    for number, each in enumerate(recorded):
        text = texts[number % len(texts)]
        length = max(_SHORTEST_PROMPT, round(each.prompt_tokens * _LENGTH_SCALE))
        share = min(1.0, length / len(encode(text)))
        prompt = encode(text[: round(len(text) * share)])
        due_s = (each.due_s - recorded[0].due_s) / speed
        requests.append(TracedRequest(due_s, prompt, max(2, round(each.output_tokens * _LENGTH_SCALE))))
    return requests


def compute(engine: Engine, requests: Sequence[TracedRequest]) -> tuple[list[list[int]], float]:
    """Compute them as they come; return the tokens, and the seconds in which the engine had work.

    Every request is a tenant of its own, so that no drafter has seen the same answer before.
    """
    eos = engine.model_config.eos_token_ids
    made: list[list[int]] = [[] for _ in requests]
    start_s, busy_s, num_added = time.perf_counter(), 0.0, 0
    while num_added < len(requests) or engine.has_work:
        now_s = time.perf_counter() - start_s
        while num_added < len(requests) and requests[num_added].due_s <= now_s:
            each = requests[num_added]
            params = SamplingParams(max_tokens=each.max_tokens, stop_token_ids=eos)
            salt = secrets.token_hex(8)
            engine.add_request(
                EngineRequest(
                    sequence_id=num_added, prompt_token_ids=each.prompt, params=params, cache_salt=salt
                )
            )
            num_added += 1
        if not engine.has_work:
            time.sleep(requests[num_added].due_s - now_s)
            continue
        begun_s = time.perf_counter()
        for output in engine.step():
            made[output.sequence_id] += output.token_ids
        busy_s += time.perf_counter() - begun_s
    return made, busy_s
