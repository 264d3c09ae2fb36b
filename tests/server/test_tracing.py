"""A streamed request's spans, by every way to a real server: they add up to what the client saw."""

from __future__ import annotations

import itertools
import json
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from perf.server.span_collector import Received, SpanCollector, span_collector

from helpers.server import Leaving, Server, start_server

ROOMY = "64000000"
PHASES = ["read", "queue", "prefill", "decode", "send"]
PROMPT = {"text_input": "ab", "max_tokens": 5, "stream": True}
# The way, and the path and body of a request.
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "text": ("/v2/models/text/generate_stream", PROMPT),
    "ensemble": ("/v2/models/ensemble/generate_stream", PROMPT),
    "openai": (
        "/completions",
        {"model": "traced", "prompt": "ab", "max_tokens": 5, "stream": True, "ignore_eos": True},
    ),
}


@pytest.fixture(scope="module")
def collector() -> Iterator[SpanCollector]:
    with span_collector() as collector:
        yield collector


@pytest.fixture(scope="module")
def traced(tiny_dir: Path, collector: SpanCollector, leaving: Leaving) -> Iterator[Server]:
    """A server whose spans go to `collector`."""
    options = (
        "--kv-cache-bytes",
        ROOMY,
        "--served-name",
        "traced",
        "--openai-port",
        "0",
        "--otlp-endpoint",
        collector.url,
    )
    server = start_server(tiny_dir, *options)
    yield server
    leaving.take(server)


def ask(server: Server, way: str, trace_id: str) -> tuple[float, str]:
    """Seconds until the end of the answer, and the parent's id that the request had."""
    path, body = WAYS[way]
    url = server.openai + path if way == "openai" else f"http://{server.http}{path}"
    parent_id = "00f067aa0ba902b7"
    headers = {"Content-Type": "application/json", "traceparent": f"00-{trace_id}-{parent_id}-01"}
    begin_s = time.monotonic()
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as answer:
        answer.read()
    return time.monotonic() - begin_s, parent_id


def of_request(collector: SpanCollector, trace_id: str) -> dict[str, Received]:
    """Naiad's spans of a trace, by name; they come within a second or two."""
    found: dict[str, Received] = {}
    with collector.changed:
        for _ in range(60):
            spans = [span for span in collector.spans() if span.trace_id == trace_id]
            found = {span.name: span for span in spans if span.resource["service.name"] != "naiad-triton"}
            if len(found) > len(PHASES):
                break
            collector.changed.wait(1)
    return found


@pytest.mark.parametrize("way", WAYS)
def test_phases_add_up_to_what_the_client_saw(traced: Server, collector: SpanCollector, way: str) -> None:
    trace_id = f"{list(WAYS).index(way) + 1:032x}"
    seconds, parent_id = ask(traced, way, trace_id)
    spans = of_request(collector, trace_id)
    (name,) = spans.keys() - set(PHASES)
    root, phases = spans[name], [spans[each] for each in PHASES]
    assert root.attributes["gen_ai.usage.output_tokens"] == 5
    assert abs(sum(phase.seconds for phase in phases) - root.seconds) < 1e-6
    assert all(earlier.end_ns == later.begin_ns for earlier, later in itertools.pairwise(phases))
    # The server's thread may see the end of the answer after its client.
    assert root.seconds - phases[-1].seconds <= seconds
    if way == "openai":
        assert root.parent_id == parent_id
    else:
        # The server's own spans are between.
        assert root.parent_id not in ("", parent_id)
    door = traced.openai.removesuffix("/v1") if way == "openai" else f"http://{traced.metrics}"
    with urllib.request.urlopen(f"{door}/metrics") as page:
        assert "naiad_trace_spans_total{" in page.read().decode()
