"""Three replicas behind each router: that it takes them as they are, and finds what their caches hold."""

from __future__ import annotations

import json
import random
import string
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from deploy.proxy import Plan
from deploy.routers import ROUTERS

from helpers.openai_api import MODEL, address
from helpers.proxied import check_lost_replica, check_rolling_restart, gained, hit_rate
from helpers.proxy_load import complete, failed
from helpers.replicas import NUM_REPLICAS, Proxy, Replicas, available, proxied

pytestmark = pytest.mark.deploy


@pytest.fixture(scope="module", params=sorted(ROUTERS))
def name(request: pytest.FixtureRequest) -> str:
    """The router; where it can not be had its tests are skipped."""
    return available(str(request.param))


@pytest.fixture(scope="module")
def router(name: str, replicas: Replicas, folder: Path) -> Iterator[Proxy]:
    with proxied(Plan(proxy=name, replicas=replicas.places), folder) as started:
        yield started


def test_chats_pass_as_the_router_writes_them(router: Proxy) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
    request = urllib.request.Request(
        f"http://{router.address}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        assert json.load(answer)["usage"]["completion_tokens"] == 2


def test_conversations_find_their_prefixes(
    name: str, replicas: Replicas, router: Proxy, folder: Path
) -> None:
    before = replicas.served()
    by_cache = hit_rate(router, with_session=False)
    shares = gained(before, replicas.served())
    print(f"requests of each: {shares}")
    with proxied(Plan(proxy=name, replicas=replicas.places, policy="random"), folder) as at_random:
        by_chance = hit_rate(at_random, with_session=False)
    assert by_cache > 0.9
    assert by_chance < 0.75


def test_a_prompt_goes_where_kv_events_say_that_its_beginning_is(replicas: Replicas, folder: Path) -> None:
    plan = Plan(proxy=available("vllm-router"), replicas=replicas.places, policy="kv_aware")
    draw = random.Random("events")
    with proxied(plan, folder) as router:
        for turn in range(2 * NUM_REPLICAS):
            place = turn % NUM_REPLICAS
            text = "".join(draw.choices(string.ascii_lowercase + " ", k=1500))
            # The router has not seen this request, so it can only know by the events.
            assert failed([complete(address(replicas.servers[place]), text)]) == []
            before = replicas.served()
            answer = complete(router.address, text + " and more")
            assert failed([answer]) == []
            assert gained(before, replicas.served())[place] == 1
            assert answer.cached >= 1400


def test_a_lost_replica_costs_its_streams_alone(replicas: Replicas, router: Proxy) -> None:
    check_lost_replica(replicas, router)


def test_a_rolling_restart_fails_no_request(replicas: Replicas, router: Proxy) -> None:
    check_rolling_restart(replicas, router)
