"""A model's requests at Triton are traced from their arrival to FINAL."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from perf.server.span_collector import SpanCollector, span_collector

from helpers.triton_server_doubles import (
    LIMITS,
    LLM_SHAPE,
    CountedIds,
    FakeEngineClient,
    FakeSender,
    let_senders_finish,
    llm_source,
)
from naiad.engine_process import Ack, AckReceiver, AckSender
from naiad.outputs import EngineStats, RequestOutput, Timings
from naiad.sequence import FinishReason, TextContext
from naiad.tracing.request_trace import Tracer
from naiad.tracing.trace_context import TraceContext
from naiad.triton_server.service import llm_service
from naiad.triton_server.service.ack_reader import AckReader
from naiad.triton_server.service.llm_service import LLMService, Telemetry, Tracing

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def traced_service(collector: SpanCollector, errors: list[str]) -> LLMService:
    telemetry = Telemetry(Tracing(Tracer(collector.exporter()), lambda: "served"))
    return LLMService(FakeEngineClient(), errors.append, CountedIds(), LLM_SHAPE, telemetry=telemetry)


def test_a_stream_has_its_phases() -> None:
    errors: list[str] = []
    with span_collector() as collector:
        service = traced_service(collector, errors)
        sent_s = time.time()
        source = llm_source(streaming=True)
        source.sent_trace = TraceContext(PARENT)
        service.accept(source, FakeSender(), LIMITS)
        now_s = time.monotonic()
        service.take_outputs([RequestOutput(1, []), RequestOutput(1, [5])], EngineStats())
        timings = Timings(now_s, now_s + 0.001, now_s + 0.002, now_s + 0.003)
        # The engine's clock is this machine's.
        time.sleep(0.004)
        last = RequestOutput(1, [6], finish_reason=FinishReason.STOP, timings=timings)
        service.take_outputs([last], EngineStats())
        let_senders_finish(service)
        root, *phases = collector.wait_for(6)
        seen_s = time.time() - sent_s
        service.close()
    assert [phase.name for phase in phases] == ["read", "queue", "prefill", "decode", "send"]
    assert abs(sum(phase.seconds for phase in phases) - root.seconds) < 1e-6
    assert root.seconds <= seen_s
    assert (root.trace_id, root.parent_id) == (PARENT[3:35], PARENT[36:52])
    assert root.attributes["gen_ai.usage.output_tokens"] == 2
    assert errors == []


def test_in_an_ensemble_it_begins_with_the_tokenizer() -> None:
    with span_collector() as collector:
        service = traced_service(collector, [])
        received_s = time.monotonic() - 5
        text_context = msgspec.json.encode(TextContext(received_s=received_s))
        service.accept(llm_source(text_context=text_context), FakeSender(), LIMITS)
        service.take_outputs([RequestOutput(1, [6], finish_reason=FinishReason.STOP)], EngineStats())
        let_senders_finish(service)
        service.take_acks([Ack(1, 1, False)])
        root, read, *_ = collector.wait_for(3)
        service.close()
    assert read.name == "read"
    assert 5 <= read.seconds <= root.seconds


def test_its_end_is_heard_without_a_round_of_housekeeping(tmp_path: Path) -> None:
    with span_collector() as collector:
        service = traced_service(collector, [])
        reader, detokenizer = AckReader(AckReceiver(tmp_path / "acks"), service), AckSender(tmp_path / "acks")
        service.accept(llm_source(text_context=msgspec.json.encode(TextContext())), FakeSender(), LIMITS)
        service.take_outputs([RequestOutput(1, [6], finish_reason=FinishReason.STOP)], EngineStats())
        let_senders_finish(service)
        detokenizer.send(1, 1, False)
        assert collector.wait_for(5)[0].name == "text_completion served"
        detokenizer.close()
        service.close()
        reader.close()


@pytest.fixture
def ensemble() -> Iterator[tuple[LLMService, SpanCollector]]:
    """A service that a detokenizer follows, whose only stream has sent its last chunk."""
    with span_collector() as collector:
        service = traced_service(collector, [])
        service.accept(llm_source(text_context=msgspec.json.encode(TextContext())), FakeSender(), LIMITS)
        service.take_outputs([RequestOutput(1, [6], finish_reason=FinishReason.STOP)], EngineStats())
        let_senders_finish(service)
        yield service, collector
        service.close()


def test_in_an_ensemble_it_ends_with_the_detokenizer(ensemble: tuple[LLMService, SpanCollector]) -> None:
    service, collector = ensemble
    assert service.open_streams() == []
    time.sleep(0.3)
    service.take_acks([Ack(1, 1, False)])
    root = collector.wait_for(5)[0]
    assert root.name == "text_completion served"
    assert root.seconds >= 0.3
    service.take_acks([Ack(1, 1, False)])


def test_an_answer_whose_detokenizer_died_ended_when_it_was_sent(
    ensemble: tuple[LLMService, SpanCollector], monkeypatch: pytest.MonkeyPatch
) -> None:
    service, collector = ensemble
    service.housekeep()
    assert collector.spans() == []
    monkeypatch.setattr(llm_service, "DEAD_DETOKENIZER_S", 0.2)
    time.sleep(0.3)
    service.housekeep()
    assert collector.wait_for(5)[0].seconds < 0.3


def test_a_refused_request_has_its_error() -> None:
    with span_collector() as collector:
        service = traced_service(collector, [])
        service.accept(llm_source(runtime_top_p=7.0), FakeSender(), LIMITS)
        root, phase = collector.wait_for(2)
        service.close()
    assert root.attributes["error.type"] == "INVALID_ARG"
    assert "top_p" in root.error
    assert phase.name == "read"


def test_the_engines_end_is_the_error_of_its_requests() -> None:
    with span_collector() as collector:
        service = traced_service(collector, [])
        service.accept(llm_source(), FakeSender(), LIMITS)
        service.engine_lost()
        let_senders_finish(service)
        root = collector.wait_for(3)[0]
        service.close()
    assert root.attributes["error.type"] == "INTERNAL"
