"""The spans of every request must have come to the collector."""

from __future__ import annotations

import argparse
import json
from contextlib import nullcontext

import pytest
from perf.server.span_collector import TRITONS_OWN, SpanCollector
from perf.server.tracing_cost import _check

# Two requests warm up, eight are measured; each has six spans.
ARGS = argparse.Namespace(turns=2, rounds=2, concurrency=1, through=["text", "llm"])
EXPECTED = 60


def spans(count: int, service: str) -> bytes:
    """Spans as a server sends them."""
    span = {"name": "queue", "traceId": "1", "spanId": "2", "startTimeUnixNano": "1", "endTimeUnixNano": "2"}
    resource = {"attributes": [{"key": "service.name", "value": {"stringValue": service}}]}
    made = {"resource": resource, "scopeSpans": [{"spans": [span] * count}]}
    return json.dumps({"resourceSpans": [made]}).encode()


@pytest.mark.parametrize("num_spans", [EXPECTED - 12, EXPECTED - 1, EXPECTED, EXPECTED + 1])
def test_as_many_spans_come_as_requests_have(num_spans: int) -> None:
    collector = SpanCollector()
    collector.take(spans(num_spans, "naiad"))
    collector.take(spans(100, TRITONS_OWN))
    is_right = num_spans >= EXPECTED
    with nullcontext() if is_right else pytest.raises(AssertionError, match=f"^{num_spans} spans came"):
        _check(collector, ARGS, timeout_s=0.0)
