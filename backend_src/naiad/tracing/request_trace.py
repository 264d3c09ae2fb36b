"""The trace of one request: a span of it, and one for each of its phases."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

from naiad.frontend.request import GenerateRequest
from naiad.frontend.request_families import REASONS
from naiad.outputs import RequestOutput, Timings
from naiad.tracing.exporter import SpanExporter, monotonic_to_unix_ns
from naiad.tracing.span import Span, SpanKind, Value, new_span_id, new_trace_id
from naiad.tracing.trace_context import TraceContext

PROVIDER = "naiad"
# A tokenizer takes less for the longest prompt.
_LONGEST_BEFORE_S = 60.0
CHAT, COMPLETION = "chat", "text_completion"


@dataclass(slots=True)
class _Moments:
    """Times of the monotonic clock, in seconds; None = not happened."""

    began_s: float
    submitted_s: float | None = None
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None

    def take(self, timings: Timings) -> None:
        """Take the engine's own times, which are those of one sequence: a request has the widest of them."""
        if timings.arrival_s:
            self.submitted_s = _earliest(self.submitted_s, timings.arrival_s)
        if timings.first_scheduled_s:
            self.first_scheduled_s = _earliest(self.first_scheduled_s, timings.first_scheduled_s)
        if timings.first_token_s:
            self.first_token_s = _earliest(self.first_token_s, timings.first_token_s)
            self.last_token_s = max(self.last_token_s or 0.0, timings.last_token_s)

    def phases(self, ended_s: float) -> list[tuple[str, float, float]]:
        """The phases, each with its begin and its end: together they are all of the time."""
        begins = [
            ("read", self.began_s),
            ("queue", self.submitted_s),
            ("prefill", self.first_scheduled_s),
            ("decode", self.first_token_s),
            ("send", self.last_token_s),
        ]
        made: list[tuple[str, float, float]] = []
        for name, begin_s in reversed(begins):
            if begin_s is not None:
                made.append((name, min(begin_s, ended_s), ended_s))
                ended_s = made[-1][1]
        return made[::-1]


def _earliest(known_s: float | None, time_s: float) -> float:
    return time_s if known_s is None else min(known_s, time_s)


@dataclass(slots=True)
class _Totals:
    """What a request has had so far.

    Attributes:
        num_cached: row → its prompt's tokens from the prefix cache.
    """

    num_output_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_cached: dict[int, int] = field(default_factory=dict)
    finish_reasons: list[str] = field(default_factory=list)


class RequestTrace:
    """Follows a request at the server by which it came. One thread may call `take`, another one the rest.

    Attributes:
        context: what is passed on to those who work for this request.
    """

    def __init__(
        self, exporter: SpanExporter, parent: TraceContext, began_s: float, *, shows_phases: bool = True
    ) -> None:
        """Begin a span.

        Args:
            exporter: takes the spans when the request has ended.
            parent: the trace that it belongs to; if there is none, a new one begins.
            began_s: when the request came, on the monotonic clock.
            shows_phases: whether it becomes known here what the engine does.
        """
        self._exporter = exporter
        self._trace_id = parent.trace_id or new_trace_id()
        self._span_id = new_span_id()
        self._parent = parent
        self.context = TraceContext(f"00-{self._trace_id}-{self._span_id}-01", parent.state)
        self._moments = _Moments(began_s)
        # The engine's times replace those that were seen here; until then these do.
        self._seen = _Moments(began_s)
        self._shows_phases = shows_phases
        self._name = COMPLETION
        self._attributes: dict[str, Value] = {"gen_ai.provider.name": PROVIDER}
        self._totals = _Totals()
        self._error: tuple[str, str] | None = None
        self._has_ended = False

    def name(self, operation: str, model: str | None, answer_id: str = "") -> None:
        """Say what was asked for.

        Args:
            operation: `CHAT` or `COMPLETION`.
            model: the model's name; None: the client left it open.
            answer_id: the id of the answer; empty: it has none.
        """
        self._name = f"{operation} {model}" if model else operation
        self._attributes["gen_ai.operation.name"] = operation
        if model:
            self._attributes["gen_ai.request.model"] = model
        if answer_id:
            self._attributes["gen_ai.response.id"] = answer_id

    def began_before(self, began_s: float) -> None:
        """Say when another process of this machine got the request, before it came here.

        Any client may claim a time, so one that is later, or much earlier, changes nothing.
        """
        if 0.0 <= self._moments.began_s - began_s <= _LONGEST_BEFORE_S:
            self._moments.began_s = self._seen.began_s = began_s

    def submit(self, request: GenerateRequest, model: str) -> None:
        """Say that the request has been read and goes to the engine, or to another one after an error.

        Args:
            request: the request.
            model: the name of the model that answers.
        """
        # What an engine before this one has done and failed at is not the request's.
        began_s = self._moments.began_s
        self._moments, self._totals, self._error = _Moments(began_s), _Totals(), None
        self._seen = _Moments(began_s, submitted_s=time.monotonic())
        params = request.rows[0].params
        self._attributes |= {
            "gen_ai.response.model": model,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.top_k": params.top_k,
            "gen_ai.request.seed": params.seed,
            "gen_ai.request.frequency_penalty": params.frequency_penalty,
            "gen_ai.request.presence_penalty": params.presence_penalty,
            "gen_ai.request.choice.count": request.outputs.num_return_sequences,
            "gen_ai.request.stream": request.streaming,
            "gen_ai.usage.input_tokens": request.num_prompt_tokens,
        }

    def take(self, row: int, output: RequestOutput) -> None:
        """Take an output of one of the row's sequences."""
        now_s, totals = time.monotonic(), self._totals
        if self._seen.first_scheduled_s is None and output.error_status is None:
            self._seen.first_scheduled_s = now_s
        if output.token_ids:
            self._seen.first_token_s = self._seen.first_token_s or now_s
            self._seen.last_token_s = now_s
            totals.num_output_tokens += len(output.token_ids)
        if output.num_cached_tokens:
            totals.num_cached[row] = max(totals.num_cached.get(row, 0), output.num_cached_tokens)
        if output.timings is not None:
            self._moments.take(output.timings)
        if output.finish_reason is not None:
            totals.finish_reasons.append(REASONS[output.finish_reason])
            totals.num_draft_tokens += output.num_draft_tokens
            totals.num_accepted_tokens += output.num_accepted_tokens

    def fail(self, kind: str, message: str) -> None:
        """Say with which error it ends; the first one stays.

        Args:
            kind: a status; there are few of them.
            message: what the client is told.
        """
        self._error = self._error or (kind, message)

    def end(self, ended_s: float | None = None) -> None:
        """Say that the client has its answer or is gone, and hand over the spans; later calls do nothing.

        Args:
            ended_s: when, on the monotonic clock; None: now.
        """
        if self._has_ended:
            return
        self._has_ended = True
        offset_ns = monotonic_to_unix_ns()
        if ended_s is None:
            ended_s = time.monotonic()
        spans = [
            Span(
                name=self._name,
                kind=SpanKind.SERVER,
                trace_id=self._trace_id,
                span_id=self._span_id,
                parent_id=self._parent.span_id,
                trace_state=self._parent.state,
                begin_ns=_unix_ns(self._moments.began_s, offset_ns),
                end_ns=_unix_ns(ended_s, offset_ns),
                attributes=self._all_attributes(),
                error="" if self._error is None else ": ".join(self._error),
            )
        ]
        phases = self._known_moments().phases(ended_s) if self._shows_phases else []
        spans += [
            Span(
                name=name,
                kind=SpanKind.INTERNAL,
                trace_id=self._trace_id,
                span_id=new_span_id(),
                parent_id=self._span_id,
                begin_ns=_unix_ns(phase_begin_s, offset_ns),
                end_ns=_unix_ns(phase_end_s, offset_ns),
            )
            for name, phase_begin_s, phase_end_s in phases
        ]
        self._exporter.add(spans)

    def _known_moments(self) -> _Moments:
        known, seen = self._moments, self._seen
        return replace(
            known,
            submitted_s=known.submitted_s or seen.submitted_s,
            first_scheduled_s=known.first_scheduled_s or seen.first_scheduled_s,
            first_token_s=known.first_token_s or seen.first_token_s,
            last_token_s=known.last_token_s or seen.last_token_s,
        )

    def _all_attributes(self) -> dict[str, Value]:
        totals, seen = self._totals, self._seen
        made = self._attributes | {
            "gen_ai.usage.output_tokens": totals.num_output_tokens,
            "gen_ai.usage.cache_read.input_tokens": sum(totals.num_cached.values()),
            "naiad.usage.draft_tokens": totals.num_draft_tokens,
            "naiad.usage.accepted_draft_tokens": totals.num_accepted_tokens,
        }
        if totals.finish_reasons:
            made["gen_ai.response.finish_reasons"] = totals.finish_reasons
        if seen.first_token_s is not None:
            made["gen_ai.response.time_to_first_chunk"] = seen.first_token_s - seen.began_s
        if self._error is not None:
            made["error.type"] = self._error[0]
        return made


@dataclass(frozen=True, slots=True)
class Tracer:
    """Begins the traces of requests that come to this process.

    Attributes:
        exporter: takes their spans.
    """

    exporter: SpanExporter

    def begin(
        self, parent: TraceContext, began_s: float, *, shows_phases: bool = True
    ) -> RequestTrace | None:
        """Begin the trace of a request; None: whoever began its trace does not want it recorded."""
        if parent.parent and not parent.is_sampled:
            return None
        return RequestTrace(self.exporter, parent, began_s, shows_phases=shows_phases)


def _unix_ns(monotonic_s: float, offset_ns: int) -> int:
    return round(monotonic_s * 1e9) + offset_ns
