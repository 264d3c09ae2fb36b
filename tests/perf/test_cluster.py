"""The simulation of replicas behind a router: every request ends once, and policies do what they are for."""

from __future__ import annotations

import itertools
import json
import math
import random
import sys
from array import array
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from perf.cluster import simulate
from perf.cluster.arrivals import Lengths, Request, dense_requests, with_other_tokens
from perf.cluster.check import ratio
from perf.cluster.replica_spec import ReplicaSpec, read_spec
from perf.cluster.routers import POLICIES, CacheAware, PrefixHash, Router
from perf.cluster.served_costs import mean_costs, prompt_costs, step_s
from perf.cluster.simulation import End, Failure, Simulation
from perf.common import report
from perf.common.plots import Panel
from perf.common.report import ROOT
from perf.server.traces import TraceRequest

from naiad.errors import ConfigError

SPEC = ReplicaSpec(
    decode=((1, 0.01), (4, 0.016)),
    short_context=128,
    context_s=0.0,
    prompt_token_s=0.001,
    pair_s=0.0,
    overhead_s=0.001,
    max_num_seqs=4,
    max_queued_requests=100,
    num_blocks=64,
    block_size=16,
    step_tokens=256,
    context_cost=0.0,
    decode_cost=1.0,
    measured="nothing",
)
NUM_GROUPS = 6


def chats(num_requests: int, per_s: float, seed: int = 1) -> list[Request]:
    """Requests of a few groups, each of which shares the first 160 of 192 prompt tokens."""
    draw = random.Random(seed)
    shared = [[draw.randrange(1000) for _ in range(160)] for _ in range(NUM_GROUPS)]
    due_s, found = 0.0, []
    for _ in range(num_requests):
        due_s += draw.expovariate(per_s)
        own = [draw.randrange(1000) for _ in range(32)]
        found.append(Request(due_s, draw.choice(shared) + own, draw.randint(1, 12)))
    return found


def simulated(
    policy: str, arrivals: list[Request], *failures: Failure, spec: ReplicaSpec = SPEC
) -> Simulation:
    simulation = Simulation(spec, router_of(policy), arrivals, failures)
    simulation.run()
    return simulation


def router_of(policy: str) -> Router:
    return POLICIES[policy](3, 0, SPEC.block_size)


def hit_rate(simulation: Simulation) -> float:
    return simulation.totals.num_hit_tokens / simulation.totals.num_queried_tokens


def test_one_request_takes_the_time_of_its_steps() -> None:
    simulation = simulated("round_robin", [Request(5.0, list(range(100)), 3)])
    outcome = simulation.outcomes[0]
    # A step for the prompt, then two of one row each.
    assert outcome.first_s == pytest.approx(0.001 + 0.1)
    assert outcome.last_s == pytest.approx(0.101 + 2 * 0.011)
    assert outcome.inter_token_s == pytest.approx(0.011)
    assert outcome.is_good(0.2, 0.02)
    assert not outcome.is_good(0.1, 0.02)
    assert not outcome.is_good(0.2, 0.01)
    assert simulation.totals.num_steps == 3


def test_what_comes_during_a_step_waits_for_its_end() -> None:
    arrivals = [Request(0.0, list(range(100)), 1), Request(0.05, list(range(200, 250)), 1)]
    simulation = Simulation(SPEC, POLICIES["round_robin"](1, 0, SPEC.block_size), arrivals)
    simulation.run()
    assert simulation.outcomes[1].first_s == pytest.approx(0.101 - 0.05 + 0.001 + 0.05)


@pytest.mark.parametrize("policy", list(POLICIES))
def test_every_request_ends_once_and_again_the_same(policy: str) -> None:
    failures = Failure(0, 2.0, 1.0), Failure(1, 6.0, 2.0)
    runs = [simulated(policy, chats(150, 15.0), *failures) for _ in range(2)]
    assert runs[0].outcomes == runs[1].outcomes
    ends = Counter(each.end for each in runs[0].outcomes)
    assert ends[End.SERVED] > 120
    assert sum(ends.values()) == 150
    assert None not in ends


def test_a_dead_replica_fails_what_has_begun_and_nothing_else() -> None:
    arrivals = [Request(0.0, list(range(100)), 50) for _ in range(3)]
    # It dies while it decodes, and has just got another prompt.
    arrivals.append(Request(0.2, list(range(500, 700)), 2))
    simulation = simulated("round_robin", arrivals, Failure(0, 0.25, 1.0))
    ends = [each.end for each in simulation.outcomes]
    assert ends == [End.FAILED, End.SERVED, End.SERVED, End.SERVED]
    assert 1 < simulation.outcomes[0].num_tokens < 50
    again = simulation.outcomes[3]
    assert (again.num_attempts, again.replica) == (2, 1)
    assert again.first_s > 0.25 - 0.2


def test_without_a_replica_requests_are_refused() -> None:
    failures = [Failure(replica, 1.0, 2.0) for replica in range(3)]
    arrivals = [Request(due_s, [1, 2, 3], 1) for due_s in (0.0, 2.0, 3.5)]
    simulation = simulated("least_request", arrivals, *failures)
    assert [each.end for each in simulation.outcomes] == [End.SERVED, End.REFUSED, End.SERVED]


def test_a_full_queue_refuses_after_other_replicas_were_tried() -> None:
    spec = ReplicaSpec(
        **{**{name: getattr(SPEC, name) for name in SPEC.__struct_fields__}, "max_queued_requests": 0}
    )
    arrivals = [Request(0.0, [number] * 20, 5) for number in range(14)]
    simulation = simulated("round_robin", arrivals, spec=spec)
    ends = Counter(each.end for each in simulation.outcomes)
    assert ends == {End.SERVED: 12, End.REFUSED: 2}
    assert max(each.num_attempts for each in simulation.outcomes) == 3


def test_affinity_finds_more_in_prefix_caches() -> None:
    # All six beginnings and what runs do not fit into one cache.
    arrivals = chats(300, 12.0)
    rates = {policy: hit_rate(simulated(policy, arrivals)) for policy in POLICIES}
    assert rates["cache_aware"] > rates["round_robin"] + 0.05
    assert rates["prefix_hash"] > rates["round_robin"] + 0.05
    assert rates["cache_aware"] > rates["random"] + 0.05


def test_the_router_knows_what_is_cached() -> None:
    router = CacheAware(3, 0, SPEC.block_size)
    simulation = Simulation(SPEC, router, chats(100, 20.0), [Failure(1, 2.0, 0.5)])
    simulation.run()
    for index, replica in enumerate(simulation._replicas):
        assert router.num_known_blocks(index) == len(replica._log.findable())
    assert any(router.num_known_blocks(index) for index in range(3))
    for index in range(3):
        router.leave(index)
    assert not router._holders


def test_only_the_prompts_of_a_lost_replica_move() -> None:
    router = PrefixHash(5, 0, SPEC.block_size)
    prompts = [[number] * 40 for number in range(200)]
    before = [router.choose(prompt) for prompt in prompts]
    assert set(before) == set(range(5))
    router.leave(2)
    during = [router.choose(prompt) for prompt in prompts]
    moved = [old for old, new in zip(before, during, strict=True) if old != new]
    assert set(moved) == {2}
    router.join(2)
    assert [router.choose(prompt) for prompt in prompts] == before


def test_hashing_is_bounded_by_the_load() -> None:
    router = PrefixHash(4, 0, SPEC.block_size)
    counts = Counter[int]()
    for _ in range(80):
        chosen = router.choose([7] * 300)
        router.send(chosen)
        counts[chosen] += 1
    assert max(counts.values()) <= 1.25 * 81 / 4 + 1


def test_a_trace_is_made_dense_with_its_own_prefixes() -> None:
    trace = [TraceRequest(float(number), 1024, 10, (1, 100 + number)) for number in range(20)]
    arrivals = dense_requests(trace, 5.0, 20.0, Lengths(0.125, 1.0, 4096))
    assert len(arrivals) == pytest.approx(100, abs=5)
    assert all(one.due_s <= two.due_s for one, two in itertools.pairwise(arrivals))
    beginnings = Counter(tuple(each.prompt[:64]) for each in arrivals)
    # Five copies, each with one shared beginning.
    assert len(beginnings) == 5
    assert all(len(each.prompt) == 128 and each.num_tokens == 10 for each in arrivals)


def test_measured_costs_are_read() -> None:
    spec = read_spec(ROOT / "perf" / "data" / "step_costs.json")
    assert spec.max_num_seqs == 32
    assert spec.max_model_len > 8192


@pytest.mark.parametrize("text", ["", "{}", '{"decode": []}'])
def test_damaged_costs_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"^--costs = .*: expected a file of perf.cluster.measure"):
        read_spec(path)


def test_the_command_prints_a_row_for_each_policy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written: list[dict[str, Any]] = []
    panels: list[Panel] = []
    monkeypatch.setattr(simulate, "write_report", lambda _, __, rows: written.extend(rows) or Path("x.json"))
    monkeypatch.setattr(simulate, "save_panels", lambda _, __, made: panels.extend(made) or "x.png")
    options = "--replicas 2,3 --loads 0.5 --duration-s 8 --kill-at-s 4 --policies round_robin,cache_aware"
    monkeypatch.setattr(sys, "argv", ["simulate", *options.split()])
    assert simulate.main() == 0
    kinds = [(row["policy"], row["replicas"]) for row in written]
    assert kinds == [("round_robin", 2), ("cache_aware", 2), ("round_robin", 3), ("cache_aware", 3)]
    for row in written:
        assert 0 <= row["good/s"] <= row["offered/s"]
        assert 0 < row["busy"] < 1
    assert [set(panel.lines) for panel in panels] == [{"round_robin", "cache_aware"}] * 3
    assert panels[2].lines["round_robin"][0] == (2, 3)
    assert "hit rate" in capsys.readouterr().out


def test_other_tokens_share_what_the_first_shared() -> None:
    requests = [Request(0.5, array("I", [1000, 48_999, 1007]), 3), Request(1.0, array("I", [1000, 5000]), 4)]
    first, second = with_other_tokens(requests, 1), with_other_tokens(requests, 2)
    assert [(each.due_s, each.num_tokens) for each in first] == [(0.5, 3), (1.0, 4)]
    assert first[0].prompt[0] == first[1].prompt[0] != second[0].prompt[0] == second[1].prompt[0]
    assert all(1000 <= token < 49_000 for each in (*first, *second) for token in each.prompt)


def test_a_step_is_timed_while_all_streams_get_tokens() -> None:
    # The second stream begins later, and two of its tokens come in one message.
    first = [(0.1 * number, 1) for number in range(1, 21)]
    second = [(1.0, 1), (1.1, 1), (1.3, 2), (1.4, 1), (1.5, 1)]
    assert step_s([first, second]) == pytest.approx(0.1)


def test_costs_of_prompts_are_found_in_their_first_tokens() -> None:
    first_s = {num: 0.5e-3 * num + 2e-7 * num * num / 2 for num in (256, 1024, 3072)}
    assert prompt_costs(first_s) == pytest.approx((0.5e-3, 2e-7))
    assert prompt_costs({256: 0.3, 1024: 1.0, 3072: 2.5})[1] == 0.0


def test_the_mean_of_two_measurements_is_half_way() -> None:
    slower = msgspec.structs.replace(SPEC, decode=((1, 0.02), (4, 0.018)), prompt_token_s=0.003)
    mean = mean_costs(SPEC, slower)
    assert mean.decode == (pytest.approx((1, 0.015)), pytest.approx((4, 0.017)))
    assert (mean.prompt_token_s, mean.num_blocks) == (pytest.approx(0.002), SPEC.num_blocks)


@pytest.mark.parametrize(
    ("predicted", "seen", "expected"),
    [(3.0, 2.0, 1.5), (0.0, 2.0, 0.0), (0.0, 0.0, 1.0), (3.0, 0.0, math.inf)],
)
def test_a_prediction_of_what_never_happens_is_infinitely_far_off(
    predicted: float, seen: float, expected: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ratio(predicted, seen) == expected
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr(report, "ROOT", tmp_path)
    path = tmp_path / report.write_report("cluster-check", {}, [{"ratio": expected}])
    (row,) = json.loads(path.read_text())["results"]
    assert row == {"ratio": expected if math.isfinite(expected) else None}
