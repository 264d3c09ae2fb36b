"""The spans of one request: its phases are all of its time, in every way that it may end."""

from __future__ import annotations

import time
from typing import Any

import pytest

from naiad.frontend.request import GenerateRequest, RequestedOutputs, RequestRow
from naiad.outputs import RequestOutput, Timings
from naiad.sequence import FinishReason, SamplingParams
from naiad.tracing.exporter import monotonic_to_unix_ns
from naiad.tracing.request_trace import COMPLETION, RequestTrace, Tracer
from naiad.tracing.span import Span
from naiad.tracing.trace_context import NO_TRACE, TraceContext

PARENT = TraceContext("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "a=1")
UNSAMPLED = TraceContext(PARENT.parent[:-2] + "00")


class Spans:
    """In place of an exporter."""

    def __init__(self) -> None:
        self.added: list[Span] = []

    def add(self, spans: list[Span]) -> None:
        self.added += spans


def begin(spans: Any, parent: TraceContext = NO_TRACE, began_s: float = 0.0) -> RequestTrace:
    trace = Tracer(spans).begin(parent, began_s or time.monotonic())
    assert trace is not None
    trace.name(COMPLETION, "model")
    return trace


def submit(trace: RequestTrace) -> None:
    params = SamplingParams(max_tokens=4, seed=7)
    row = RequestRow(prompt_token_ids=[1, 2, 3], params=params, text=None, cache_salt="")
    request = GenerateRequest(
        request_id="",
        rows=[row],
        timeout_s=None,
        streaming=True,
        exclude_input=True,
        outputs=RequestedOutputs(),
    )
    trace.submit(request, "served")


def seconds_of(spans: Spans) -> dict[str, float]:
    root, *phases = spans.added
    made = {span.name: (span.end_ns - span.begin_ns) / 1e9 for span in phases}
    assert sum(made.values()) == pytest.approx((root.end_ns - root.begin_ns) / 1e9, abs=1e-6)
    assert [span.begin_ns for span in phases] == sorted(span.begin_ns for span in phases)
    return made


def test_phases_have_the_engines_times() -> None:
    spans, now_s = Spans(), time.monotonic()
    trace = begin(spans, PARENT, now_s - 10)
    submit(trace)
    trace.take(0, RequestOutput(1, []))
    trace.take(0, RequestOutput(1, [5], num_cached_tokens=2))
    timings = Timings(now_s - 9.5, now_s - 8, now_s - 6, now_s - 2)
    trace.take(0, RequestOutput(1, [6], finish_reason=FinishReason.LENGTH, timings=timings))
    trace.end()
    seconds = seconds_of(spans)
    assert [round(each, 3) for each in seconds.values()][:4] == [0.5, 1.5, 2.0, 4.0]
    assert seconds["send"] >= 2
    root, *phases = spans.added
    assert (root.name, root.trace_id, root.parent_id) == (
        "text_completion model",
        PARENT.trace_id,
        PARENT.span_id,
    )
    assert {(span.trace_id, span.parent_id) for span in phases} == {(PARENT.trace_id, root.span_id)}
    assert trace.context == TraceContext(f"00-{PARENT.trace_id}-{root.span_id}-01", "a=1")
    attributes = dict(root.attributes)
    assert attributes.pop("gen_ai.response.time_to_first_chunk") >= 10
    assert attributes == {
        "gen_ai.provider.name": "naiad",
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": "model",
        "gen_ai.response.model": "served",
        "gen_ai.request.max_tokens": 4,
        "gen_ai.request.temperature": 0.0,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.top_k": 0,
        "gen_ai.request.seed": 7,
        "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.request.choice.count": 1,
        "gen_ai.request.stream": True,
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 2,
        "gen_ai.usage.cache_read.input_tokens": 2,
        "gen_ai.response.finish_reasons": ["length"],
        "naiad.usage.draft_tokens": 0,
        "naiad.usage.accepted_draft_tokens": 0,
    }


def test_of_several_sequences_the_widest_times_count() -> None:
    spans, now_s = Spans(), time.monotonic()
    trace = begin(spans, began_s=now_s - 10)
    submit(trace)
    for row, (first_s, last_s) in enumerate(((7, 3), (6, 1))):
        timings = Timings(now_s - 10, now_s - 8, now_s - first_s, now_s - last_s)
        trace.take(row, RequestOutput(row, [5], finish_reason=FinishReason.STOP, timings=timings))
    trace.end()
    assert round(seconds_of(spans)["decode"], 3) == 6.0
    assert spans.added[0].attributes["gen_ai.response.finish_reasons"] == ["stop", "stop"]


def test_whoever_leaves_in_the_queue_has_read_and_waited() -> None:
    spans = Spans()
    trace = begin(spans)
    submit(trace)
    trace.fail("CANCELLED", "the client is gone")
    trace.fail("INTERNAL", "later")
    trace.end()
    trace.end()
    assert list(seconds_of(spans)) == ["read", "queue"]
    assert spans.added[0].error == "CANCELLED: the client is gone"
    assert spans.added[0].attributes["error.type"] == "CANCELLED"


def test_before_the_last_output_the_times_are_those_seen_here() -> None:
    spans = Spans()
    trace = begin(spans)
    submit(trace)
    trace.take(0, RequestOutput(1, []))
    trace.take(0, RequestOutput(1, [5]))
    trace.end()
    assert list(seconds_of(spans)) == ["read", "queue", "prefill", "decode", "send"]


def test_only_the_model_that_answers_counts() -> None:
    """Another model answers after the first one was lost, so the request has not failed."""
    spans = Spans()
    trace = begin(spans)
    submit(trace)
    trace.take(0, RequestOutput(1, [5], num_cached_tokens=2))
    trace.fail("INTERNAL", "the engine process ended")
    submit(trace)
    trace.take(0, RequestOutput(1, [6], finish_reason=FinishReason.LENGTH, timings=Timings()))
    trace.end()
    root = spans.added[0]
    assert not root.error
    assert "error.type" not in dict(root.attributes)
    assert dict(root.attributes)["gen_ai.usage.output_tokens"] == 1
    assert list(seconds_of(spans)) == ["read", "queue", "prefill", "decode", "send"]


def test_a_request_that_was_refused_has_only_been_read() -> None:
    spans = Spans()
    trace = begin(spans)
    trace.fail("INVALID_ARG", "max_tokens = 0: expected ≥ 1")
    trace.end()
    assert list(seconds_of(spans)) == ["read"]


def test_in_front_of_a_remote_server_no_phases_are_shown() -> None:
    spans: Any = Spans()
    trace = Tracer(spans).begin(NO_TRACE, time.monotonic(), shows_phases=False)
    assert trace is not None
    trace.end()
    assert [span.name for span in spans.added] == ["text_completion"]


def test_a_trace_that_nobody_records_is_not_recorded_here() -> None:
    spans: Any = Spans()
    assert Tracer(spans).begin(UNSAMPLED, 0.0) is None


def test_a_request_begins_where_another_process_got_it() -> None:
    spans, now_s = Spans(), time.monotonic()
    trace = begin(spans, began_s=now_s)
    trace.began_before(now_s - 3)
    submit(trace)
    trace.end()
    assert round(seconds_of(spans)["read"], 1) == 3.0


@pytest.mark.parametrize("claimed_s", [0.0, -1e300, 1e300, float("inf"), float("nan")])
def test_times_that_cannot_be_true_change_nothing(claimed_s: float) -> None:
    spans = Spans()
    trace = begin(spans, began_s=1_000_000.0)
    trace.began_before(claimed_s)
    trace.end()
    assert spans.added[0].begin_ns == pytest.approx(1e15 + monotonic_to_unix_ns(), abs=1e6)
