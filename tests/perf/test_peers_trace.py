from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from perf.peers.adapter_process import Served
from perf.peers.contestants import Contestant
from perf.peers.trace import rate_setters, replay, split
from perf.server.open_loop import Arrival
from perf.server.trace_part import TracePart, read_part
from perf.server.traces import TraceRequest


def contestant(name: str, adapter: str, environment: str, group: str = "16-bit") -> Contestant:
    return Contestant(name, environment, adapter, "checkpoint", group, 2, 2, {})


OURS = contestant("ours", "naiad", "")
FAST = contestant("fast", "vllm", "peer")
SLOW = contestant("slow", "openvino", "peer")
BATCHES = contestant("batches", "llama_cpp", "peer")
OURS_8 = contestant("ours 8", "naiad", "", "8-bit")
PART = TracePart([TraceRequest(float(2 * number), 40, 8) for number in range(6)], 5000, 1024)


class FakeServers:
    """Each serves a request in a time of its own; the first token comes after half of it."""

    def __init__(self, request_s: dict[Contestant, float]) -> None:
        self.request_s = request_s
        self.served: list[tuple[str, list[float]]] = []

    @property
    def running(self) -> list[Contestant]:
        return list(self.request_s)

    def serve(self, each: Contestant, arrivals: Sequence[Arrival]) -> Served | None:
        self.served.append((each.name, [arrival.due_s for arrival in arrivals]))
        if each.name == "slow" and len(self.served) > 10:
            return None
        request_s = self.request_s[each]
        done = [request_s * (number + 1) for number in range(len(arrivals))]
        return Served([each / 2 for each in done], done, [arrival.num_tokens for arrival in arrivals])


def test_a_part_of_the_real_trace_starts_at_0_and_is_clipped() -> None:
    part = read_part(64, 49152, 130)
    assert len(part.requests) == 64
    assert part.requests[0].due_s == 0
    arrivals = part.arrivals(2.0)
    assert all(len(each.prompt_token_ids) + each.num_tokens <= 130 for each in arrivals)
    long = sum(round(each.prompt_tokens / 4) + round(each.output_tokens / 4) > 130 for each in part.requests)
    assert part.num_clipped == long > 0
    # 63 intervals at two requests a second.
    assert arrivals[-1].due_s == pytest.approx(63 / 2)
    assert {each.due_s for each in part.arrivals(math.inf)} == {0.0}
    lengths = [(len(each.prompt_token_ids), each.num_tokens) for each in arrivals]
    assert lengths == [(len(each.prompt_token_ids), each.num_tokens) for each in part.arrivals(math.inf)]


def test_peers_set_the_rate_unless_a_group_has_none() -> None:
    assert rate_setters([OURS, FAST, SLOW, OURS_8]) == [FAST, SLOW, OURS_8]


def test_parts_follow_each_other_and_start_at_0() -> None:
    parts = split([Arrival(float(number), [1], 1) for number in range(5)], 2)
    assert [[each.due_s for each in part] for part in parts] == [[0, 1, 2], [0, 1]]


def test_each_group_gets_80_percent_of_its_best_peers_rate_in_turns() -> None:
    servers = FakeServers({OURS: 0.1, FAST: 0.2, BATCHES: 0.1, OURS_8: 0.05})
    rows = {row["contestant"]: row for row in replay(servers, PART, rounds=2)}
    assert list(rows) == ["ours", "fast", "ours 8"]
    # Six requests in 1.2 s: 5 a second, of which 80 % are offered.
    assert (rows["fast"]["saturated_per_s"], rows["ours"]["saturated_per_s"]) == (5.0, None)
    assert {rows[name]["offered_per_s"] for name in ("ours", "fast")} == {4.0}
    assert rows["ours 8"]["offered_per_s"] == 16.0
    # Warm-ups, then the peers' saturation, then rounds in turns.
    names = [name for name, _ in servers.served]
    assert names == [*("ours", "fast", "ours 8"), *("fast", "ours 8"), *("ours", "fast", "ours 8") * 2]
    name, due_s = servers.served[5]
    assert name == "ours"
    assert due_s == pytest.approx([0, 0.25, 0.5])
    assert rows["ours"]["num_requests"] == 6
    # First tokens after 0.05, 0.1 and 0.15 s in both rounds.
    assert rows["ours"]["ttft_p50_s"] == 0.1


def test_who_fails_in_a_round_has_no_figures() -> None:
    servers = FakeServers({OURS: 0.1, FAST: 0.2, SLOW: 0.4})
    assert [row["contestant"] for row in replay(servers, PART, rounds=3)] == ["ours", "fast"]
