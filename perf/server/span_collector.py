"""A collector of spans: takes OTLP/HTTP with JSON, and keeps what it gets."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from naiad.tracing.exporter import Collector, SpanExporter

# The service of the spans that Triton makes itself.
TRITONS_OWN = "naiad-triton"


@dataclass(frozen=True)
class Received:
    """A span as it came.

    Attributes:
        attributes: with plain values.
        resource: the attributes of what made it.
    """

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    begin_ns: int
    end_ns: int
    attributes: dict[str, Any]
    resource: dict[str, Any]
    error: str

    @property
    def is_tritons_own(self) -> bool:
        """Whether Triton made it, not Naiad."""
        return bool(self.resource["service.name"] == TRITONS_OWN)

    @property
    def seconds(self) -> float:
        """Its length."""
        return (self.end_ns - self.begin_ns) / 1e9


@dataclass
class SpanCollector:
    """What a collector has got; `status` is its next answers'."""

    url: str = ""
    status: int = 200
    bodies: list[bytes] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def take(self, body: bytes) -> int:
        """Keep a body; return the status of the answer."""
        with self.changed:
            if self.status == 200:
                self.bodies.append(body)
            self.changed.notify_all()
            return self.status

    def spans(self) -> list[Received]:
        """All spans in JSON."""
        with self.changed:
            bodies = [json.loads(body) for body in self.bodies if body.startswith(b"{")]
        return [
            _received(span, _plain(resource["resource"]["attributes"]))
            for body in bodies
            for resource in body["resourceSpans"]
            for scope in resource["scopeSpans"]
            for span in scope["spans"]
        ]

    def wait_for(self, num_spans: int, timeout_s: float = 60) -> list[Received]:
        """Wait until so many spans have come; return all."""
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.spans()) >= num_spans, timeout_s), self.spans()
        return self.spans()

    def exporter(self) -> SpanExporter:
        """An exporter that sends spans here at once."""
        return SpanExporter(Collector.parse("endpoint", self.url), {"service.name": "test"}, collect_s=0.0)


@contextlib.contextmanager
def span_collector(port: int = 0) -> Iterator[SpanCollector]:
    """Listen on a free port, or on this one."""
    collector = SpanCollector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(collector.take(body) if self.path == "/v1/traces" else 404)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        collector.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield collector
        finally:
            server.shutdown()


def _received(span: dict[str, Any], resource: dict[str, Any]) -> Received:
    return Received(
        name=span["name"],
        trace_id=span["traceId"],
        span_id=span["spanId"],
        parent_id=span.get("parentSpanId", ""),
        begin_ns=int(span["startTimeUnixNano"]),
        end_ns=int(span["endTimeUnixNano"]),
        attributes=_plain(span.get("attributes", [])),
        resource=resource,
        error=span.get("status", {}).get("message", ""),
    )


def _plain(attributes: list[dict[str, Any]]) -> dict[str, Any]:
    return {each["key"]: _value(each["value"]) for each in attributes}


def _value(value: dict[str, Any]) -> Any:
    ((kind, inner),) = value.items()
    if kind == "intValue":
        assert isinstance(inner, str), "OTLP/JSON writes integers as text"
        return int(inner)
    return [_value(each) for each in inner["values"]] if kind == "arrayValue" else inner
