"""Recorded traffic with real texts: what is asked, and which time counts."""

from __future__ import annotations

import itertools
import time
from types import SimpleNamespace
from typing import Any

import pytest
from perf.engine.traced_texts import compute, with_texts
from perf.server.open_loop import Arrival
from perf.server.trace_part import read_part

from naiad.outputs import RequestOutput
from naiad.sequence import EngineRequest


def encode(text: str) -> list[int]:
    """A token for each character, and five of a template."""
    return [1] * 5 + [ord(each) for each in text]


def test_texts_get_the_recorded_lengths_and_the_rate_that_is_asked_for() -> None:
    part = read_part(20, vocab_size=2000, max_length=1024)
    requests = with_texts(part, ["a" * 40, "b" * 4000], encode, per_s=4.0)
    assert len(requests) == 20
    assert (requests[0].due_s, requests[-1].due_s) == (0.0, pytest.approx(19 / 4.0))
    assert all(earlier.due_s <= later.due_s for earlier, later in itertools.pairwise(requests))
    assert {chr(each.prompt_token_ids[-1]) for each in requests[::2]} == {"a"}
    lengths = [len(each.prompt_token_ids) for each in requests]
    # The short text is never stretched, and the long one is cut to lengths of its own.
    assert max(lengths[::2]) <= 45
    assert len(set(lengths[1::2])) > 3
    assert [each.num_tokens for each in requests] == [each.num_tokens for each in part.arrivals(4.0)]


class SlowEngine:
    """Makes a token of each request a step, and takes 20 ms for it."""

    model_config = SimpleNamespace(eos_token_ids=(0,))

    def __init__(self) -> None:
        self._left: dict[int, int] = {}
        self.salts: list[str] = []
        self.num_steps = 0

    @property
    def has_work(self) -> bool:
        return bool(self._left)

    def add_request(self, request: EngineRequest) -> None:
        self._left[request.sequence_id] = request.params.max_tokens
        self.salts.append(request.cache_salt)

    def step(self) -> list[RequestOutput]:
        time.sleep(0.02)
        self.num_steps += 1
        outputs = [RequestOutput(number, [left]) for number, left in self._left.items()]
        self._left = {number: left - 1 for number, left in self._left.items() if left > 1}
        return outputs


def test_the_time_counts_in_which_there_is_work() -> None:
    engine: Any = SlowEngine()
    requests = [Arrival(0.0, [1, 2], 3), Arrival(0.01, [3], 2), Arrival(0.5, [4], 1)]
    begun = time.perf_counter()
    made, busy_s = compute(engine, requests)
    assert made == [[3, 2, 1], [2, 1], [1]]
    assert len(set(engine.salts)) == 3
    assert 0.02 * engine.num_steps <= busy_s <= time.perf_counter() - begun - 0.2
