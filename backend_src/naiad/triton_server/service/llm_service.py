"""Serves a model's requests, without using Triton: sends rows to the engine and outputs to their streams.

Threads: `accept` runs in Triton's thread, `take_outputs` in the engine client's dispatcher, and `housekeep`
in the housekeeping thread; both read acknowledgements, as the acknowledgement reader's own thread does. The
sender pool sends the streams' responses.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Protocol

from naiad.config.probe import PROBE_REQUEST_ID
from naiad.engine_process import Ack
from naiad.engine_process.observations import ForwardedObservations, Observations
from naiad.errors import (
    CancelledError,
    EngineLostError,
    InternalError,
    NaiadError,
    UnavailableError,
    error_with_status,
    place_of,
)
from naiad.frontend.limits import ModelLimits
from naiad.frontend.request import GenerateRequest, StopRequest
from naiad.frontend.request_families import CountedFates
from naiad.outputs import EngineStats, RequestOutput
from naiad.recording.recorder import Recorder
from naiad.sequence import EngineRequest, FinishReason
from naiad.tracing.request_trace import COMPLETION, RequestTrace, Tracer
from naiad.triton_server.requests.tensors import RequestSource
from naiad.triton_server.responses.short_chunk import TEXT_CHUNK
from naiad.triton_server.responses.stream import (
    BeamRow,
    JoinedRow,
    ProbeBuilder,
    ResponseBuilder,
    ResponseStream,
    Sender,
    StreamRow,
)
from naiad.triton_server.service.client_watch import (
    IDLE_ROUND_S,
    ROUND_S,
    StepPace,
    streams_to_poll,
    streams_to_probe,
)
from naiad.triton_server.service.handed_over import HandedOver
from naiad.triton_server.service.lasting_stats import LastingStats, LastingUsage
from naiad.triton_server.service.sender_pool import SenderPool

NUM_SENDERS = 2
DEAD_DETOKENIZER_S = 30.0


@dataclass(frozen=True, slots=True)
class RequestShape:
    """How a model reads requests and writes responses.

    Attributes:
        read: reads a client's request, or raises a NaiadError.
        build: builds the tensors of a response.
        build_probe: builds a probe, an empty response that the detokenizer acknowledges; None: no
            detokenizer follows.
        cancel_message: message of the error with which a cancelled request ends; "": it ends with the
            tokens that it has.
    """

    read: Callable[[RequestSource, ModelLimits], GenerateRequest | StopRequest]
    build: ResponseBuilder
    build_probe: ProbeBuilder | None = None
    cancel_message: str = ""

    @property
    def has_detokenizer(self) -> bool:
        """Whether rows with text go through a detokenizer, which acknowledges chunks and probes."""
        return self.build_probe is not None


class EngineConnection(Protocol):
    """The methods of an engine client that the service uses."""

    def submit(self, requests: list[EngineRequest]) -> None:
        """Send rows to the engine; raises UnavailableError while it restarts."""

    def abort(self, sequence_ids: list[int]) -> None:
        """End these sequences with `cancelled`."""

    def stop_others(self, request_id: str) -> None:
        """Have the engine's other clients cancel their requests of this id."""


@dataclass(frozen=True, slots=True)
class Tracing:
    """How a model's requests are traced.

    Attributes:
        tracer: begins their traces.
        model: returns the name of the model that answers.
    """

    tracer: Tracer
    model: Callable[[], str]


@dataclass(frozen=True, slots=True)
class Telemetry:
    """What is told about a model's requests.

    Attributes:
        tracing: how they are traced; None: they are not.
        recorder: records them; None: they are not recorded.
    """

    tracing: Tracing | None = None
    recorder: Recorder | None = None


class LLMService:
    """Owns every live request until its FINAL has been sent.

    Attributes:
        last_asked_s: when the last request came, in seconds of `time.monotonic`; 0: none has.
        read_acks: called when acknowledgements that have come should be taken now.
        want_acks: called when the next one is urgent for a stream or a trace.
    """

    def __init__(
        self,
        engine: EngineConnection,
        log_error: Callable[[str], None],
        draw_first_id: Callable[[int], int],
        shape: RequestShape,
        owns_engine: bool = True,
        telemetry: Telemetry | None = None,
    ) -> None:
        """Start the sender threads.

        Args:
            engine: the client of the engine.
            log_error: writes a line to the log.
            draw_first_id: returns the id of a request's first sequence, given their number; the others have
                the ids that follow.
            shape: how the model reads requests and writes responses.
            owns_engine: whether the engine reports every step to it, including those for other models'
                requests.
            telemetry: what is told about requests; None: nothing.
        """
        self._tracing = None if telemetry is None else telemetry.tracing
        self._recorder = None if telemetry is None else telemetry.recorder
        self._shape = shape
        self._owns_engine = owns_engine
        self._draw_first_id = draw_first_id
        self._engine = engine
        self._log_error = log_error
        self._lock = threading.Lock()
        self._streams: dict[int, tuple[ResponseStream, StreamRow]] = {}
        self._has_news = threading.Event()
        self._handed_over = HandedOver()
        self._senders = SenderPool(NUM_SENDERS, self._flush)
        self.observations = Observations()
        self.forwarded = ForwardedObservations()
        self._stats = LastingStats()
        self.usage = LastingUsage()
        self._pace = StepPace()
        self.last_asked_s = 0.0
        self.read_acks: Callable[[], None] = lambda: None
        self.want_acks: Callable[[], None] = lambda: None
        self._want_ack: set[ResponseStream] = set()

    @property
    def needs_acks(self) -> bool:
        """Whether the next acknowledgement is urgent for a stream or a trace."""
        return bool(self._want_ack) or self._handed_over.is_waiting

    @property
    def stats(self) -> EngineStats:
        """The engine's stats; a restart of the engine does not reset the totals."""
        return self._stats.now()

    @property
    def _has_work(self) -> bool:
        """Whether there are clients to check, or stats that change with each step."""
        stats = self._stats.now()
        return bool(self._streams) or (self._owns_engine and stats.num_running + stats.num_waiting > 0)

    def accept(self, source: RequestSource, sender: Sender, limits: ModelLimits) -> None:
        """Send a request's rows to the engine, or an error and FINAL to its client. Never raises."""
        self.last_asked_s = time.monotonic()
        trace = self._begin_trace(source)
        try:
            request = self._shape.read(source, limits)
            if isinstance(request, StopRequest):
                if request.request_id != PROBE_REQUEST_ID:
                    self.cancel_requests(request.request_id)
                    self._engine.stop_others(request.request_id)
                sender.send(None, final=True)
            else:
                self._start(request, sender, trace, source)
        except NaiadError as error:
            self._refuse(sender, error, trace)
        except Exception as error:  # noqa: BLE001 — only this request fails
            self._refuse(sender, self._internal_error(error), trace)

    def take_outputs(self, outputs: Iterable[RequestOutput], stats: EngineStats | None) -> None:
        """Add each output to its stream; if `stats` is None, the previous stats remain valid."""
        self.read_acks()
        outputs = list(outputs)
        has_worked = self._has_work
        # Before the stats, so that the observations include every request that the stats count.
        self.observations.take_outputs(outputs)
        if self._recorder is not None:
            self._recorder.take_outputs(outputs)
        if stats is not None:
            self._stats.take(stats)
            self._pace.take(stats, time.monotonic())
        touched: dict[int, ResponseStream] = {}
        with self._lock:
            found = [self._streams.get(output.sequence_id) for output in outputs]
        for output, place in zip(outputs, found, strict=True):
            if place is None:
                continue
            stream, row = place
            self._push(stream, row, output)
            touched[id(stream)] = stream
        for stream in touched.values():
            if stream.error is not None:
                self._abort_rest(stream)
        if stats is not None and not (has_worked and self._has_work):
            self._has_news.set()
        # Last, because a sender that wakes up has to wait while this thread goes on.
        self._senders.schedule(*touched.values())

    def take_acks(self, acks: Iterable[Ack]) -> None:
        """Take the detokenizer's acknowledgements, some of which say that the client has gone."""
        for ack in acks:
            with self._lock:
                found = self._streams.get(ack.sequence_id)
            if found is None:
                self._handed_over.acknowledge(ack.sequence_id, ack.num_chunks)
                continue
            stream, row = found
            has_waited = stream.acknowledge(row, ack.num_chunks)
            self._note_whether_urgent(stream)
            if stream.is_closed and stream.trace is not None:
                self._handed_over.acknowledged(stream)
            if ack.is_cancelled:
                self._cancel(stream)
            if has_waited:
                self._senders.schedule(stream)

    def engine_lost(self, sequence_ids: Collection[int] | None = None) -> None:
        """End the streams of these sequences (None: all) with an error: their engine process has ended."""
        self.observations.lose(sequence_ids)
        if self._recorder is not None:
            self._recorder.lose(sequence_ids)
        self._stats.lose()
        self.usage.lose()
        self._has_news.set()
        with self._lock:
            ids = self._streams.keys() if sequence_ids is None else self._streams.keys() & sequence_ids
            lost = {id(stream): stream for stream, _ in map(self._streams.__getitem__, ids)}
        for stream in lost.values():
            stream.fail(EngineLostError())
            self._senders.schedule(stream)

    def cancel_requests(self, request_id: str) -> None:
        """Cancel every live request of this id."""
        for stream in self.open_streams():
            if stream.request.request_id == request_id:
                self._cancel(stream)

    def housekeep(self) -> float:
        """Run one round: poll clients, send probes for those that cannot be polled, and end stuck streams.

        Returns:
            Seconds until the next round.
        """
        self.read_acks()
        now_s = time.monotonic()
        streams = self.open_streams()
        for stream in streams_to_poll(streams, now_s, self._pace.period_s):
            stream.last_polled_s = now_s
            if stream.sender.is_cancelled():
                self._cancel(stream)
        for stream in streams_to_probe(streams, now_s, self._pace.period_s):
            stream.is_probe_due = True
            self._senders.schedule(stream)
        for stream in streams:
            if stream.error is not None:
                self._senders.schedule(stream)
            elif now_s - stream.last_sent_s > DEAD_DETOKENIZER_S and stream.is_waiting_for_acks:
                stream.fail(UnavailableError("the detokenizer does not answer"))
                self._abort_rest(stream)
        self._handed_over.end_before(now_s - DEAD_DETOKENIZER_S)
        return ROUND_S if self._has_work else IDLE_ROUND_S

    def rest(self, seconds: float) -> bool:
        """Wait for the next round; return whether it is early, because work has begun or ended."""
        has_news = self._has_news.wait(seconds)
        self._has_news.clear()
        return has_news

    @property
    def fates(self) -> list[CountedFates]:
        """What is sent and written of its requests beside their answers."""
        spans = [] if self._tracing is None else [self._tracing.tracer.exporter]
        return [*spans, *([] if self._recorder is None else [self._recorder.file])]

    def open_streams(self) -> list[ResponseStream]:
        """The streams whose FINAL has not been sent."""
        with self._lock:
            return list({id(stream): stream for stream, _ in self._streams.values()}.values())

    def close(self) -> None:
        """Fail the open streams and end the threads."""
        for stream in self.open_streams():
            stream.fail(UnavailableError("the server is stopping"))
            self._senders.schedule(stream)
        self._senders.close()
        self._handed_over.end_before(math.inf)
        if self._tracing is not None:
            self._tracing.tracer.exporter.close()
        if self._recorder is not None:
            self._recorder.file.close()

    def _begin_trace(self, source: RequestSource) -> RequestTrace | None:
        if self._tracing is None:
            return None
        trace = self._tracing.tracer.begin(source.trace_context(), time.monotonic())
        if trace is not None:
            trace.name(COMPLETION, self._tracing.model())
        return trace

    def _refuse(self, sender: Sender, error: NaiadError, trace: RequestTrace | None) -> None:
        sender.send_error(error)
        if trace is not None:
            trace.fail(error.status, str(error))
            trace.end()

    def _start(
        self, request: GenerateRequest, sender: Sender, trace: RequestTrace | None, source: RequestSource
    ) -> None:
        rows = new_stream_rows(request, self._draw_first_id)
        has_detokenizer = self._shape.has_detokenizer and request.rows[0].text is not None
        if has_detokenizer:
            _let_take_text_chunks(rows, source)
        stream = ResponseStream(request, sender, rows, has_detokenizer, trace)
        if trace is not None and self._tracing is not None:
            text = request.rows[0].text
            if text is not None:
                trace.began_before(text.received_s)
            trace.submit(request, self._tracing.model())
        with self._lock:
            if not self._streams:
                self._has_news.set()
            for row in rows:
                self._streams.update(dict.fromkeys(row.sequence_ids, (stream, row)))
        asked = request.engine_requests(rows[0].sequence_id)
        self.observations.begin(asked, request.outputs.num_return_sequences)
        if self._recorder is not None:
            self._recorder.begin(asked)
        try:
            self._engine.submit(asked)
        except Exception as error:  # noqa: BLE001 — a registered request ends by its stream
            self.observations.forget(asked)
            if self._recorder is not None:
                self._recorder.forget(asked)
            # The loss of the engine may have failed the stream already; `fail` keeps the first error.
            stream.fail(error if isinstance(error, NaiadError) else self._internal_error(error))
            self._senders.schedule(stream)
            return
        if stream.is_cancelling:
            # The abort may have reached the engine before the rows.
            self._abort_rest(stream)

    def _internal_error(self, error: Exception) -> NaiadError:
        """Log a bug of ours; return the error that the client gets, which holds no details."""
        self._log_error(f"naiad: a request failed with {place_of(error)}")
        return InternalError("internal error while reading the request")

    def _push(self, stream: ResponseStream, row: StreamRow, output: RequestOutput) -> None:
        try:
            stream.push(row, output, self._error_of(output))
        except Exception as error:  # noqa: BLE001 — only this stream ends
            self._log_error(f"naiad: an output could not be taken: {place_of(error)}")
            stream.fail(InternalError("internal error while answering the request"))

    def _cancel(self, stream: ResponseStream) -> None:
        if not stream.is_cancelling:
            stream.is_cancelling = True
            self._abort_rest(stream)

    def _abort_rest(self, stream: ResponseStream) -> None:
        self._engine.abort(stream.live_sequence_ids())

    def _flush(self, stream: ResponseStream) -> None:
        try:
            stream.flush(self._shape.build, self._shape.build_probe)
        except Exception as error:  # noqa: BLE001 — only this stream ends
            self._log_error(f"naiad: sending a response failed with {place_of(error)}")
            self._abort_rest(stream)
            said = error
            if not isinstance(said, NaiadError):
                said = InternalError("internal error while answering the request")
            if stream.trace is not None:
                stream.trace.fail(said.status, type(error).__name__)
                stream.trace.end()
            stream.is_closed = True
            # Fails if FINAL has been sent already, or if nothing can be sent.
            with contextlib.suppress(Exception):
                stream.sender.send_error(said)
        if self._note_whether_urgent(stream):
            self.want_acks()
        if stream.is_closed:
            self._forget(stream)

    def _note_whether_urgent(self, stream: ResponseStream) -> bool:
        """Note, and return, whether the stream's next acknowledgement is urgent."""
        with stream.lock:
            is_urgent = stream.wants_ack
            if is_urgent:
                self._want_ack.add(stream)
            else:
                self._want_ack.discard(stream)
        return is_urgent

    def _error_of(self, output: RequestOutput) -> NaiadError | None:
        if output.finish_reason is FinishReason.CANCELLED and self._shape.cancel_message:
            return CancelledError(self._shape.cancel_message)
        if output.finish_reason is not FinishReason.ERROR:
            return None
        return error_with_status(output.error_status or "INTERNAL", output.error_message)

    def _forget(self, stream: ResponseStream) -> None:
        if stream.trace is not None:
            # First, so that no acknowledgement finds the stream in neither place.
            self._handed_over.end_trace(stream, stream.trace)
            self.want_acks()
        with self._lock:
            for row in stream.rows:
                for sequence_id in row.sequence_ids:
                    self._streams.pop(sequence_id, None)
            if not self._streams:
                self._has_news.set()


def _let_take_text_chunks(rows: Iterable[StreamRow], source: RequestSource) -> None:
    """Let rows take `text_chunk`, unless their models were chained before there was this tensor."""
    is_taken = TEXT_CHUNK in source.requested_outputs()
    for row in rows:
        row.takes_text_chunks = is_taken


def new_stream_rows(request: GenerateRequest, draw_first_id: Callable[[int], int]) -> list[StreamRow]:
    """Make a stream row for each sequence or beam search, in the order of the request's rows and of ids.

    Args:
        request: the request.
        draw_first_id: returns the id of the first sequence, given their number; the others have the ids
            that follow. Ids must be hard to guess, because any process that acknowledges a chunk of a
            sequence can report its client as gone.
    """
    num_sequences = request.outputs.num_sequences
    ids = itertools.count(draw_first_id(request.num_sequences))
    if request.outputs.beam_width > 1 or request.joins_sequences:
        row_kind = BeamRow if request.outputs.beam_width > 1 else JoinedRow
        return [
            row_kind(index, next(ids), sibling_ids=tuple(itertools.islice(ids, num_sequences - 1)))
            for index in range(len(request.rows))
        ]
    return [
        StreamRow(index, next(ids), sequence_index)
        for index in range(len(request.rows))
        for sequence_index in range(num_sequences)
    ]
