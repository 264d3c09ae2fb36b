"""Which tokens the speeds with and without drafts count."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from perf.engine.speculation import _generate

from naiad.outputs import RequestOutput


class ScriptedEngine:
    """Returns the tokens of each step from a list."""

    model_config = SimpleNamespace(eos_token_ids=(0,))

    def __init__(self, *steps: dict[int, list[int]]) -> None:
        self._steps = list(steps)

    @property
    def has_work(self) -> bool:
        return bool(self._steps)

    def add_request(self, _: object) -> None:
        """Nothing depends on it."""

    def step(self) -> list[RequestOutput]:
        return [RequestOutput(number, ids) for number, ids in self._steps.pop(0).items()]


def test_tokens_count_whose_time_counts() -> None:
    # The second prompt is read while the first text goes on.
    engine: Any = ScriptedEngine({0: [1]}, {0: [2], 1: [3]}, {0: [4, 5], 1: [6]}, {1: [7]})
    made, num_later, seconds = _generate(engine, [[9], [9]], 4)
    assert made == [[1, 2, 4, 5], [3, 6, 7]]
    assert num_later == 4
    assert seconds >= 0
