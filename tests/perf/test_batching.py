"""When each way of batching lets requests begin, and what it counts as waste."""

from __future__ import annotations

import pytest
from perf.engine.batching import WAYS, Room, Run, Server, Way, mean_over, shares_below
from perf.server.open_loop import Arrival

from naiad.outputs import EngineStats, RequestOutput
from naiad.sequence import EngineRequest, FinishReason

ROOM = Room(num_slots=2, window_tokens=20, max_delay_s=5.0)


class SteadyEngine:
    """Gives each request a token in a step of one second."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.began_s: dict[int, float] = {}
        self._left: dict[int, int] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._left)

    def add_request(self, request: EngineRequest) -> None:
        self.began_s[request.sequence_id] = self.now_s
        self._left[request.sequence_id] = request.params.max_tokens
        assert len(self._left) <= ROOM.num_slots

    def step(self) -> list[RequestOutput]:
        self.now_s += 1
        outputs = []
        for number in list(self._left):
            self._left[number] -= 1
            reason = None if self._left[number] else FinishReason.LENGTH
            outputs.append(RequestOutput(number, [7], finish_reason=reason))
            if reason:
                del self._left[number]
        return outputs

    def stats(self) -> EngineStats:
        return EngineStats(num_used_blocks=len(self._left), block_size=8)

    def sleep(self, _seconds: float) -> None:
        self.now_s += 0.5


def served(way: Way, *lengths: int, due_s: float = 0.0) -> tuple[SteadyEngine, Run]:
    engine = SteadyEngine()
    server = Server(engine, way, ROOM, lambda: engine.now_s, engine.sleep)
    arrivals = [Arrival(due_s * number, [1, 2], length) for number, length in enumerate(lengths)]
    return engine, server.serve(arrivals)


def test_a_static_batch_waits_for_its_longest_request() -> None:
    engine, run = served(WAYS[0], 2, 6, 1)
    assert engine.began_s == {0: 0.0, 1: 0.0, 2: 6.0}
    # The first request's slot is held for four seconds while the third one waits.
    assert (run.wasted_slot_s, run.waited_slot_s) == (4.0, 12.0)
    assert run.num_tokens == 9


def test_in_flight_a_request_begins_when_another_ends() -> None:
    engine, run = served(WAYS[2], 2, 6, 1)
    assert engine.began_s == {0: 0.0, 1: 0.0, 2: 2.0}
    assert run.wasted_slot_s == 0.0
    assert run.first_token_s == {0: 1.0, 1: 1.0, 2: 3.0}


@pytest.mark.parametrize(("way", "began_s"), [(WAYS[0], 7.0), (WAYS[1], 5.0), (WAYS[2], 0.0)])
def test_a_batch_that_is_not_full(way: Way, began_s: float) -> None:
    # The second request comes after seven seconds.
    engine, run = served(way, 1, 1, due_s=7.0)
    assert engine.began_s[0] == began_s
    # Both slots stand empty while the first request waits for its batch.
    assert run.wasted_slot_s == run.waited_slot_s == 2 * began_s


def test_without_paging_each_slot_has_room_for_the_longest_sequence() -> None:
    _, whole = served(WAYS[2], 2)
    _, paged = served(WAYS[3], 2)
    assert whole.reserved_kv_s == 40.0
    # A block of eight, and in the last step, whose end frees it, the three tokens in it.
    assert paged.reserved_kv_s == 11.0
    assert whole.used_kv_s == paged.used_kv_s == 5.0
    assert whole.figures(WAYS[2])["kv_wasted"] == 0.875


def test_a_plot_shows_means_over_windows_of_time() -> None:
    middles, means = mean_over([(1.0, 4), (2.5, 0), (5.0, 2)], window_s=2.0)
    assert middles == [1.0, 3.0, 4.5]
    assert means == [2.0, 1.5, 2.0]


def test_while_nothing_is_computed_the_plot_shows_nothing() -> None:
    # The second request comes after seven seconds.
    _, run = served(WAYS[2], 2, 1, due_s=7.0)
    assert run.occupancy == [(1.0, 1), (2.0, 1), (7.0, 0), (8.0, 1)]
    assert mean_over(run.occupancy, window_s=1.0)[1] == [1, 1, 0, 0, 0, 0, 0, 1]


def test_a_plot_shows_some_of_many_waits() -> None:
    times, shares = shares_below([float(each) for each in range(1001)], num_points=5)
    assert times == [0.0, 250.0, 500.0, 750.0, 1000.0]
    assert shares == [(place + 1) / 1001 for place in (0, 250, 500, 750, 1000)]
    assert shares_below([3.0], num_points=5) == ([3.0], [1.0])
