"""Spans reach a collector, or are dropped and counted; who adds them never waits."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

import pytest
from perf.server.span_collector import span_collector

from helpers.ports import free_port
from naiad.errors import ConfigError
from naiad.tracing.exporter import MAX_WAITING, Collector, SpanExporter
from naiad.tracing.span import Span, SpanKind, Value


def span(name: str = "a", **attributes: Value) -> Span:
    return Span(
        name=name,
        kind=SpanKind.INTERNAL,
        trace_id="1" * 32,
        span_id="2" * 16,
        begin_ns=5,
        end_ns=2**62,
        attributes=attributes,
    )


def eventually(condition: object) -> None:
    assert callable(condition)
    end_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end_s, "did not happen"
        time.sleep(0.01)


def test_spans_come_as_they_are() -> None:
    with span_collector() as collector:
        exporter = collector.exporter()
        exporter.add([span(text="ü", yes=True, num=2**63 - 1, large=2**64 - 1, part=0.5, names=["x", "y"])])
        (received,) = collector.wait_for(1)
        exporter.close()
    assert received.attributes == {
        "text": "ü",
        "yes": True,
        "num": 2**63 - 1,
        "large": str(2**64 - 1),
        "part": 0.5,
        "names": ["x", "y"],
    }
    assert (received.begin_ns, received.end_ns, received.error) == (5, 2**62, "")
    assert received.resource == {"service.name": "test"}
    assert exporter.counts() == {"sent": 1, "dropped": 0}


def test_a_collector_that_is_away_costs_nothing_but_spans() -> None:
    away = Collector.parse("endpoint", f"http://127.0.0.1:{free_port()}")
    exporter = SpanExporter(away, {}, collect_s=0.0)
    # Batches are on their way while the spans are added, and leave room for others.
    for _ in range(2 * MAX_WAITING):
        exporter.add([span()])
    eventually(lambda: exporter.counts()["dropped"] > 0)
    assert exporter.counts()["sent"] == 0
    exporter.close()


def test_what_a_busy_collector_refuses_is_sent_again() -> None:
    with span_collector() as collector:
        collector.status = 503
        exporter = collector.exporter()
        exporter.add([span("first")])
        with collector.changed:
            assert collector.changed.wait(60)
            collector.status = 200
        assert [each.name for each in collector.wait_for(1)] == ["first"]
        eventually(lambda: exporter.counts() == {"sent": 1, "dropped": 0})
        exporter.close()


def test_what_a_collector_does_not_understand_is_dropped() -> None:
    with span_collector() as collector:
        collector.status = 400
        exporter = collector.exporter()
        exporter.add([span(), span()])
        eventually(lambda: exporter.counts() == {"sent": 0, "dropped": 2})
        exporter.close()


def test_a_host_that_can_not_be_one_drops_spans_and_no_more() -> None:
    exporter = SpanExporter(Collector.parse("endpoint", f"http://{'a' * 64}.example"), {}, collect_s=0.0)
    exporter.add([span()])
    eventually(lambda: exporter.counts() == {"sent": 0, "dropped": 1})
    assert exporter._thread.is_alive()
    exporter.close()


def test_an_answer_without_an_end_is_not_read() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60)
        said = threading.Thread(target=_speak_without_end, args=(server,))
        said.start()
        exporter = SpanExporter(
            Collector.parse("endpoint", f"http://127.0.0.1:{server.getsockname()[1]}"), {}, collect_s=0.0
        )
        exporter.add([span()])
        eventually(lambda: exporter.counts() == {"sent": 1, "dropped": 0})
        exporter.close()
        said.join(60)
        assert not said.is_alive()


def _speak_without_end(server: socket.socket) -> None:
    """Answer a client with 200 and a body that ends when the client goes."""
    client, _ = server.accept()
    with client, contextlib.suppress(OSError):
        client.settimeout(60)
        client.recv(1 << 16)
        client.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            client.sendall(bytes(1 << 16))


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://localhost:4318", "http://localhost:4318/v1/traces"),
        ("https://otel.example/base/", "https://otel.example/base/v1/traces"),
    ],
)
def test_spans_go_below_the_endpoint(endpoint: str, url: str) -> None:
    assert Collector.parse("key", endpoint).url == url


@pytest.mark.parametrize(
    "endpoint",
    [
        "",
        "localhost:4318",
        "ftp://a",
        "http://",
        "http://a:b",
        "http://u:p@a",
        "http://a?b",
        "http://a b",
        "http://a#b",
    ],
)
def test_other_addresses_are_refused_by_name(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"^key = .*: expected the address of a collector's OTLP/HTTP port"):
        Collector.parse("key", endpoint)
