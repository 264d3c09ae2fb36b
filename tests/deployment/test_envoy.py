"""Three replicas behind Envoy: what it spreads, keeps together, sends elsewhere and leaves out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from deploy.proxy import Plan, program_of

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
from helpers.replicas import Proxy, Replicas, proxied
from naiad.errors import StartupError

pytestmark = pytest.mark.deploy


@pytest.fixture(scope="module", autouse=True)
def program() -> None:
    """Envoy; without it all tests are skipped."""
    try:
        program_of("envoy")
    except StartupError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("envoy")


@pytest.fixture(scope="module")
def envoy(replicas: Replicas, folder: Path) -> Iterator[Proxy]:
    with proxied(Plan(proxy="envoy", replicas=replicas.places), folder) as proxy:
        yield proxy


def test_load_is_spread(replicas: Replicas, envoy: Proxy) -> None:
    check_load_is_spread(replicas, envoy)


def test_a_session_stays_with_one_replica(replicas: Replicas, envoy: Proxy) -> None:
    check_sessions_stay(replicas, envoy)


def test_sessions_find_their_prefixes(replicas: Replicas, envoy: Proxy, folder: Path) -> None:
    by_session = hit_rate(envoy, with_session=True)
    with proxied(Plan(proxy="envoy", replicas=replicas.places, policy="random"), folder) as proxy:
        by_chance = hit_rate(proxy, with_session=False)
    assert by_session > 0.9
    assert by_chance < 0.75


def test_a_full_replica_is_passed_over(replicas: Replicas, envoy: Proxy) -> None:
    check_busy_replica_passes_on(replicas, envoy)
    assert num_retries(envoy) > 0


def num_retries(envoy: Proxy) -> int:
    stats = json.loads(envoy.admin("/stats?format=json&filter=cluster.openai.upstream_rq_retry$"))["stats"]
    return int(stats[0]["value"])


@pytest.mark.parametrize("policy", ["least_request", "weighted"])
def test_a_slow_replica_is_avoided(replicas: Replicas, folder: Path, policy: str) -> None:
    with proxied(Plan(proxy="envoy", replicas=replicas.places, policy=policy), folder) as proxy:
        check_slow_replica_is_avoided(replicas, proxy)


def test_streams_of_grpc_are_spread(replicas: Replicas, envoy: Proxy) -> None:
    streams = [
        Stream(
            envoy.grpc, "ensemble", text_inputs(f"Story {number}", 400, ignore_eos=True) | {"stream": True}
        )
        for number in range(6)
    ]
    outcomes = [stream.join(120) for stream in streams]
    assert [(each.errors, each.num_finals, each.call_error) for each in outcomes] == [([], 1, "")] * 6
    chosen = json.loads(envoy.admin("/clusters?format=json"))["cluster_statuses"]
    (grpc,) = (each for each in chosen if each["name"] == "grpc")
    totals = [
        int(stat.get("value", 0))
        for host in grpc["host_statuses"]
        for stat in host["stats"]
        if stat["name"] == "rq_total"
    ]
    print(f"streams of each: {totals}")
    assert totals == [2, 2, 2]


def test_a_lost_replica_costs_its_streams_alone(replicas: Replicas, envoy: Proxy) -> None:
    check_lost_replica(replicas, envoy)


def test_a_rolling_restart_fails_no_request(replicas: Replicas, envoy: Proxy) -> None:
    check_rolling_restart(replicas, envoy)
