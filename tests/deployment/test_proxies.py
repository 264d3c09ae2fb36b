"""Three replicas behind each proxy: what it spreads, keeps together, sends elsewhere and leaves out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from deploy.proxy import TEMPLATES, Plan

from helpers.proxied import (
    check_busy_replica_passes_on,
    check_load_is_spread,
    check_lost_replica,
    check_rolling_restart,
    check_sessions_stay,
    check_slow_replica_is_avoided,
    hit_rate,
)
from helpers.raw_grpc import Stream, text_inputs
from helpers.replicas import Proxy, Replicas, available, proxied

pytestmark = pytest.mark.deploy


@pytest.fixture(scope="module", params=sorted(TEMPLATES))
def name(request: pytest.FixtureRequest) -> str:
    """The proxy; where it can not be had its tests are skipped."""
    return available(str(request.param))


@pytest.fixture(scope="module")
def proxy(name: str, replicas: Replicas, folder: Path) -> Iterator[Proxy]:
    with proxied(Plan(proxy=name, replicas=replicas.places), folder) as started:
        yield started


def test_load_is_spread(replicas: Replicas, proxy: Proxy) -> None:
    check_load_is_spread(replicas, proxy)


def test_a_session_stays_with_one_replica(replicas: Replicas, proxy: Proxy) -> None:
    check_sessions_stay(replicas, proxy)


def test_sessions_find_their_prefixes(replicas: Replicas, proxy: Proxy, folder: Path) -> None:
    by_session = hit_rate(proxy, with_session=True)
    plan = Plan(proxy=proxy.plan.proxy, replicas=replicas.places, policy="random")
    with proxied(plan, folder) as at_random:
        by_chance = hit_rate(at_random, with_session=False)
    assert by_session > 0.9
    assert by_chance < 0.75


def test_a_full_replica_is_passed_over(replicas: Replicas, proxy: Proxy) -> None:
    check_busy_replica_passes_on(replicas, proxy)


def test_a_slow_replica_is_avoided(replicas: Replicas, proxy: Proxy) -> None:
    check_slow_replica_is_avoided(replicas, proxy)


def test_envoy_weighs_replicas_by_what_they_report(replicas: Replicas, folder: Path, name: str) -> None:
    if name != "envoy":
        pytest.skip("only Envoy reads load reports")
    with proxied(Plan(proxy=name, replicas=replicas.places, policy="weighted"), folder) as proxy:
        # It believes reports after two seconds, and takes weights from them each second.
        check_slow_replica_is_avoided(replicas, proxy, learns_for_s=6)


def test_streams_of_grpc_are_spread(replicas: Replicas, proxy: Proxy) -> None:
    before = [server.settled("nv_inference_request_success", model="ensemble") for server in replicas.servers]
    streams = [
        Stream(
            proxy.grpc, "ensemble", text_inputs(f"Story {number}", 400, ignore_eos=True) | {"stream": True}
        )
        for number in range(6)
    ]
    outcomes = [stream.join(120) for stream in streams]
    assert [(each.errors, each.num_finals, each.call_error) for each in outcomes] == [([], 1, "")] * 6
    after = [server.settled("nv_inference_request_success", model="ensemble") for server in replicas.servers]
    shares = [now - then for then, now in zip(before, after, strict=True)]
    print(f"{proxy.plan.proxy}, streams of each: {shares}")
    assert sum(shares) == 6
    assert max(shares) <= 4


def test_a_lost_replica_costs_its_streams_alone(replicas: Replicas, proxy: Proxy) -> None:
    check_lost_replica(replicas, proxy)


def test_a_rolling_restart_fails_no_request(replicas: Replicas, proxy: Proxy) -> None:
    check_rolling_restart(replicas, proxy)
