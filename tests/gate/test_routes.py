"""Each path of Triton's HTTP port with each method: what the gate lets through."""

from __future__ import annotations

import itertools

import pytest

from naiad.gate.limits import Limits
from naiad.gate.refusal import RefusedError
from naiad.gate.request_head import read_head
from naiad.gate.routes import INFERENCE, METRICS, MODEL_CONTROL, RouteTable

METHODS = ("GET", "POST", "HEAD", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "ANY")
MODELS = ("/v2/models/llm", "/v2/models/llm/versions/1")
OPEN = {
    "/v2": "GET",
    "/v2/health/live": "GET",
    "/v2/health/ready": "GET",
    "/v2/models/stats": "GET",
    **dict.fromkeys(MODELS, "GET"),
    **{f"{model}/{end}": "GET" for model in MODELS for end in ("ready", "config", "stats")},
    **{f"{model}/{end}": "POST" for model in MODELS for end in ("infer", "generate", "generate_stream")},
}
CONTROL = {
    "/v2/repository/index": "POST",
    "/v2/repository/models/llm/load": "POST",
    "/v2/repository/models/llm/unload": "POST",
}
CLOSED = [
    "/v2/systemsharedmemory/status",
    "/v2/systemsharedmemory/region/a/register",
    "/v2/systemsharedmemory/unregister",
    "/v2/cudasharedmemory/region/a/register",
    "/v2/trace/setting",
    "/v2/models/llm/trace/setting",
    "/v2/logging",
    "/v2/repository/a/index",
    "/v2/repository/a/models/llm/load",
]
UNKNOWN = [
    "/",
    "/metrics",
    "/V2",
    "//v2",
    "/v2/",
    "/v2?a",
    "/v2/./health/live",
    "/v2/models/llm/../../logging",
    "/v2/models//infer",
    "/v2/models/../generate",
    "/v2/models/llm/versions/-1/infer",
    "/v2/models/llm/versions/1/infer/",
    "/v2/models/l%6cm/generate",
    "/v2/models/llm/generate?x=1",
    "/v2/models/llm/generate;x",
    "/v2/models/llm/explain",
    "/v2/models/" + "a" * 200,
]


def status(table: RouteTable, method: str, path: str) -> int:
    try:
        table.find(read_head(f"{method} {path} HTTP/1.1\r\nHost: a".encode(), Limits()))
    except RefusedError as refusal:
        return refusal.http_status
    return 200


@pytest.mark.parametrize(("method", "path"), [*itertools.product(METHODS, OPEN)])
def test_open_paths_pass_with_their_method(method: str, path: str) -> None:
    assert status(RouteTable(INFERENCE), method, path) == (200 if OPEN[path] == method else 405)


@pytest.mark.parametrize(("method", "path"), [*itertools.product(METHODS, CONTROL)])
def test_model_control_passes_where_it_is_on(method: str, path: str) -> None:
    assert status(RouteTable(INFERENCE), method, path) == 403
    assert status(RouteTable((*INFERENCE, *MODEL_CONTROL)), method, path) == (
        200 if method == CONTROL[path] else 405
    )


@pytest.mark.parametrize(("method", "path"), [*itertools.product(METHODS, CLOSED)])
def test_closed_paths_are_refused_by_name(method: str, path: str) -> None:
    assert status(RouteTable((*INFERENCE, *MODEL_CONTROL)), method, path) == 403


def test_a_refusal_names_model_control_only_where_it_is_off() -> None:
    head = read_head(b"POST /v2/repository/a/index HTTP/1.1\r\nHost: a", Limits())
    with pytest.raises(RefusedError, match=r"model control \(--model-control-mode explicit opens it\)$"):
        RouteTable(INFERENCE).find(head)
    for routes in ((*INFERENCE, *MODEL_CONTROL), METRICS):
        with pytest.raises(RefusedError, match=r"the gate does not let through this path$"):
            RouteTable(routes).find(head)


@pytest.mark.parametrize(("method", "path"), [*itertools.product(METHODS, UNKNOWN)])
def test_other_paths_are_refused(method: str, path: str) -> None:
    assert status(RouteTable((*INFERENCE, *MODEL_CONTROL)), method, path) == 404


@pytest.mark.parametrize("method", METHODS)
def test_the_metrics_port_has_the_metrics_alone(method: str) -> None:
    assert status(RouteTable(METRICS), method, "/metrics") == (200 if method == "GET" else 405)
    assert status(RouteTable(METRICS), method, "/v2/health/live") == 404
