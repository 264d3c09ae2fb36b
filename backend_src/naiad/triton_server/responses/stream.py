"""The responses of one request: collects its rows' outputs and decides when they may be sent.

The dispatcher thread fills a stream, and its one sender thread empties it. It holds at most one
pending chunk for each row: tokens that arrive while a chunk is waiting are merged into it. When a
detokenizer follows, at most `WINDOW` chunks of a row are outstanding, that is, sent but not yet
acknowledged; the first and the last chunk never wait.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy.typing as npt

from naiad.errors import NaiadError, error_with_status
from naiad.frontend.chunks import Chunk, merged
from naiad.frontend.request import GenerateRequest
from naiad.outputs import RequestOutput
from naiad.tracing.request_trace import RequestTrace

WINDOW = 2
ERROR_PATIENCE_S = 1.5

Tensors = dict[str, npt.NDArray[Any]]


class Sender(Protocol):
    """Sends a request's responses; used by one thread at a time."""

    def send(self, tensors: Tensors | None, *, final: bool) -> None:
        """Send a response, or a bare FINAL when `tensors` is None."""

    def send_error(self, error: NaiadError) -> None:
        """Send the error and FINAL in one message."""

    def is_cancelled(self) -> bool:
        """Whether the client is known to be gone."""


class ResponseBuilder(Protocol):
    """Builds the tensors of a response; each frontend has one."""

    def __call__(self, row: StreamRow, chunk: Chunk, /) -> Tensors:
        """Return the output tensors of one response of a row."""


# A row → the tensors of a probe, which asks the detokenizer whether the client is still there.
ProbeBuilder = Callable[["StreamRow"], Tensors]


@dataclass(slots=True)
class StreamRow:
    """One sequence of the request.

    Attributes:
        index: index of the request's row, from 0.
        sequence_id: the engine's id of the sequence.
        has_started: whether the engine has reported that it is computing the sequence.
        sequence_index: index among the sequences of the row's prompt, from 0.
        takes_text_chunks: whether what follows takes `text_chunk`, one tensor for all that it needs.
        text: the text sent so far, if each response repeats all of it; otherwise empty.
        context_logits: logits of the prompt; sent with the first chunk, and again with the last, which is
            the one that TensorRT-LLM's client reads.
    """

    index: int
    sequence_id: int
    sequence_index: int = 0
    pending: RequestOutput | None = None
    outstanding: int = 0
    is_finished: bool = False
    num_sent_chunks: int = 0
    has_started: bool = False
    takes_text_chunks: bool = False
    text: str = ""
    context_logits: bytes = b""

    @property
    def sequence_ids(self) -> tuple[int, ...]:
        """The ids of the sequences whose outputs belong to this row."""
        return (self.sequence_id,)

    @property
    def abort_ids(self) -> tuple[int, ...]:
        """The ids to abort so that all of the row's sequences end."""
        return self.sequence_ids

    @property
    def never_started(self) -> bool:
        """Whether its deadline passed while it was queued, and this has not been sent yet."""
        return self.pending is not None and self.pending.error_status is not None

    def add(self, output: RequestOutput) -> None:
        """Store an output until it can be sent."""
        self.pending = output if self.pending is None else merged(self.pending, output)

    def pending_outputs(self, num_sequences: int) -> tuple[RequestOutput, ...]:
        """The outputs to send next, one for each of the row's first `num_sequences` sequences."""
        assert self.pending is not None
        return (self.pending,)

    def may_send(self, is_streaming: bool) -> bool:
        """Whether the pending chunk may be sent now."""
        if self.pending is None or self.is_finished:
            return False
        if self.pending.finish_reason is not None:
            return True
        return is_streaming and self.outstanding < WINDOW

    @property
    def is_held_back(self) -> bool:
        """Whether the row has something to send, and its window is full."""
        return self.pending is not None and self.outstanding >= WINDOW and not self.is_finished


@dataclass(slots=True, eq=False)
class ResponseStream:
    """All sequences of one request, whose outputs go to one client."""

    request: GenerateRequest
    sender: Sender
    rows: list[StreamRow]
    has_detokenizer: bool
    trace: RequestTrace | None = None
    error: NaiadError | None = None
    error_since_s: float = 0.0
    last_sent_s: float = field(default_factory=time.monotonic)
    last_polled_s: float = 0.0
    is_closed: bool = False
    is_cancelling: bool = False
    is_probe_due: bool = False
    is_probing: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def push(self, row: StreamRow, output: RequestOutput, error: NaiadError | None) -> None:
        """Take an engine output. An error ends the whole request.

        Passed deadlines end it with an error only if none of its sequences has started; otherwise each
        sequence ends with the tokens that it has.
        """
        if self.trace is not None:
            self.trace.take(row.index, output)
        with self.lock:
            if error is not None:
                self._fail(error)
                return
            if output.only_started:
                row.has_started = True
                return
            row.add(output)
            row.has_started |= not row.never_started
            if output.error_status is not None and all(each.never_started for each in self.rows):
                self._fail(error_with_status(output.error_status or "UNAVAILABLE", output.error_message))

    def fail(self, error: NaiadError) -> None:
        """End the request with this error once its outstanding chunks are acknowledged."""
        with self.lock:
            self._fail(error)

    def _fail(self, error: NaiadError) -> None:
        if self.error is None and not self.is_closed:
            self.error = error
            if self.trace is not None:
                self.trace.fail(error.status, str(error))
            self.error_since_s = time.monotonic()

    def acknowledge(self, row: StreamRow, num_chunks: int) -> bool:
        """Record acknowledged chunks of this row; return whether something may have waited for them."""
        with self.lock:
            row.outstanding = max(0, row.outstanding - num_chunks)
            self.is_probing &= self.is_waiting_for_acks
            return row.pending is not None or self.error is not None

    def live_sequence_ids(self) -> list[int]:
        """The ids of the sequences that have not ended."""
        return [each for row in self.rows if not row.is_finished for each in row.abort_ids]

    @property
    def is_waiting_for_acks(self) -> bool:
        """Whether the detokenizer has not acknowledged all chunks yet."""
        return any(row.outstanding for row in self.rows)

    @property
    def wants_ack(self) -> bool:
        """Whether the next acknowledgement is urgent: it lets something be sent, or it answers a probe."""
        is_urgent = self.is_probing or self.error is not None or any(row.is_held_back for row in self.rows)
        return is_urgent and self.is_waiting_for_acks and not self.is_closed

    @property
    def has_begun(self) -> bool:
        """Whether the engine has started to compute it; from then on it may hold blocks."""
        return any(row.has_started for row in self.rows)

    @property
    def has_sent(self) -> bool:
        """Whether a response has been sent to the client."""
        return any(row.num_sent_chunks for row in self.rows)

    @property
    def _has_results(self) -> bool:
        return any(
            row.num_sent_chunks or (row.pending is not None and not row.never_started) for row in self.rows
        )

    @property
    def wants_poll(self) -> bool:
        """Whether the sender can report that the client is gone, and has not reported it yet."""
        return not (self.has_detokenizer or self.is_closed or self.is_cancelling or self.error)

    def wants_probe(self, now_s: float, period_s: float) -> bool:
        """Whether to send a probe, which asks the detokenizer if the client is still there."""
        return (
            self.has_detokenizer
            and not (self.is_closed or self.is_cancelling or self.error)
            and now_s - self.last_sent_s >= period_s
            and not self.is_waiting_for_acks
        )

    def flush(self, build: ResponseBuilder, build_probe: ProbeBuilder | None) -> None:
        """Send what may be sent now. Runs in the stream's sender thread."""
        final = False
        while not final:
            with self.lock:
                step = self._next(build, build_probe)
            if step is None:
                return
            said, final = step
            self.last_sent_s = time.monotonic()
            if isinstance(said, NaiadError):
                self.sender.send_error(said)
            else:
                self.sender.send(said, final=final)

    def _next(
        self, build: ResponseBuilder, build_probe: ProbeBuilder | None
    ) -> tuple[Tensors | NaiadError, bool] | None:
        """Return what to send now and whether it is the last response; None if there is nothing yet."""
        if self.is_closed:
            return None
        if self.error is not None:
            waited_s = time.monotonic() - self.error_since_s
            if self.is_waiting_for_acks and waited_s < ERROR_PATIENCE_S:
                return None
            self.is_closed = True
            return self.error, True
        for row in self.rows:
            if row.may_send(self.request.streaming) and (self._has_results or not row.never_started):
                return self._take(row, build)
        if self.is_probe_due and build_probe is not None:
            self.is_probe_due = False
            row = next(row for row in self.rows if not row.is_finished)
            row.outstanding += 1
            self.is_probing = True
            return build_probe(row), False
        return None

    def _take(self, row: StreamRow, build: ResponseBuilder) -> tuple[Tensors, bool]:
        outputs = row.pending_outputs(self.request.outputs.num_return_sequences)
        chunk = Chunk(self.request, row.index, row.sequence_index, row.sequence_id, outputs)
        row.pending = None
        row.is_finished = chunk.is_last
        if chunk.first.context_logits:
            row.context_logits = chunk.first.context_logits
        elif row.is_finished:
            chunk.first.context_logits = row.context_logits
        self.is_closed = row.is_finished and all(each.is_finished for each in self.rows)
        tensors = build(row, chunk)
        row.num_sent_chunks += 1
        if self.has_detokenizer:
            row.outstanding += 1
        return tensors, self.is_closed


@dataclass(slots=True)
class JoinedRow(StreamRow):
    """A row that is sent as one response when all of its sequences have ended.

    Attributes:
        sibling_ids: ids of the sequences after the first, in order.
        parts: sequence id → its output so far.
    """

    sibling_ids: tuple[int, ...] = ()
    parts: dict[int, RequestOutput] = field(default_factory=dict)

    @property
    def sequence_ids(self) -> tuple[int, ...]:
        """The ids of all sequences, in order."""
        return self.sequence_id, *self.sibling_ids

    @property
    def abort_ids(self) -> tuple[int, ...]:
        """All ids: each sequence ends by itself."""
        return self.sequence_ids

    def add(self, output: RequestOutput) -> None:
        """Store a sequence's output; when all have ended, the first one's becomes the pending output."""
        earlier = self.parts.get(output.sequence_id)
        self.parts[output.sequence_id] = output if earlier is None else merged(earlier, output)
        ended = [part for part in self.parts.values() if part.finish_reason is not None]
        if len(ended) == len(self.sequence_ids):
            self.pending = self.parts[self.sequence_id]

    def pending_outputs(self, num_sequences: int) -> tuple[RequestOutput, ...]:
        """The outputs to send next, one for each of the row's first `num_sequences` sequences."""
        return tuple(self.parts[each] for each in self.sequence_ids[:num_sequences])


class BeamRow(JoinedRow):
    """A beam search; its sequences are its results, best first."""

    __slots__ = ()

    @property
    def abort_ids(self) -> tuple[int, ...]:
        """The first id only: aborting it ends the whole search."""
        return (self.sequence_id,)
