"""What the templates of the proxies make of a list of replicas; no proxy runs."""

from __future__ import annotations

import argparse

import pytest
import yaml
from deploy.proxy import Plan, rendered, replica_of
from deploy.routers import ROUTERS

from naiad.config import EngineConfig
from naiad.errors import StartupError

PLACES = [replica_of("127.0.0.1:9000:8001"), replica_of("127.0.0.1:9010:8011")]


def test_envoy_lists_each_replica_once_in_each_cluster() -> None:
    made = yaml.safe_load(rendered(Plan(proxy="envoy", replicas=PLACES)))
    clusters = made["static_resources"]["clusters"]
    assert [each["name"] for each in clusters] == ["openai", "openai_by_session", "grpc", "grpc_by_session"]
    for each in clusters:
        (group,) = each["load_assignment"]["endpoints"]
        ports = [
            place["endpoint"]["address"]["socket_address"]["port_value"] for place in group["lb_endpoints"]
        ]
        assert ports == ([9000, 9010] if each["name"].startswith("openai") else [8001, 8011])


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (Plan(proxy="haproxy", replicas=PLACES, policy="weighted"), "haproxy has least_request, random"),
        (Plan(proxy="envoy", replicas=[*PLACES, replica_of("other:9000")]), "of each replica, or of none"),
        (Plan(proxy="envoy", replicas=PLACES, session_header="a: b"), "--session-header is a: b"),
    ],
)
def test_what_can_not_be_is_refused(plan: Plan, message: str) -> None:
    with pytest.raises(StartupError, match=message):
        rendered(plan)


def test_haproxy_lists_each_replica_once_in_each_backend() -> None:
    made = rendered(Plan(proxy="haproxy", replicas=PLACES))
    for backend in ("openai", "openai_by_session"):
        (text,) = [part for part in made.split("\n\n") if part.startswith(f"backend {backend}\n")]
        assert [line.split()[2] for line in text.splitlines() if line.strip().startswith("server ")] == [
            *("127.0.0.1:9000", "127.0.0.1:9010"),
        ]
    assert made.count("127.0.0.1:8001 proto h2 port 9000") == 2


@pytest.mark.parametrize("proxy", ["envoy", "haproxy"])
def test_grpc_is_left_out_where_no_replica_has_it(proxy: str) -> None:
    places = [replica_of("a.example.com:9000"), replica_of("b.example.com:9000")]
    made = rendered(Plan(proxy=proxy, replicas=places))
    assert "grpc" not in made.replace("retry", "")
    assert ("STRICT_DNS" in made) == (proxy == "envoy")


def test_routers_get_each_replica_and_its_events() -> None:
    places = [replica_of("a:9000::5557"), replica_of("b:9010:8001:5567")]
    command = ROUTERS["vllm-router"](Plan(proxy="vllm-router", replicas=places, policy="kv_aware"))
    at = command.index("--worker-urls")
    assert command[at + 1 : at + 3] == ["http://a:9000", "http://b:9010"]
    sources = [command[i + 1] for i, word in enumerate(command) if word == "--kv-event-source"]
    assert sources == ["http://a:9000=tcp://a:5557", "http://b:9010=tcp://b:5567"]
    size = command[command.index("--kv-event-block-size") + 1]
    assert size == str(EngineConfig(model_dir="").block_size)
    plan = Plan(proxy="vllm-router", replicas=PLACES, policy="kv_aware")
    with pytest.raises(StartupError, match="name the port of the KV events"):
        ROUTERS["vllm-router"](plan)
    with pytest.raises(StartupError, match="sglang-router has cache_aware, power_of_two, random"):
        ROUTERS["sglang-router"](Plan(proxy="sglang-router", replicas=PLACES, policy="kv_aware"))
    with pytest.raises(StartupError, match="--session-header is x-mine"):
        ROUTERS["sglang-router"](Plan(proxy="sglang-router", replicas=PLACES, session_header="x-mine"))


@pytest.mark.parametrize(
    "text", ["localhost", "a:0", "a:65536", "a:1:2:3:4", "a:1::", "[::1]:9000", "http://a:9000"]
)
def test_a_replica_is_a_host_with_its_ports(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="expected HOST:OPENAI_PORT"):
        replica_of(text)
