"""What a client of the engine observes of its requests, kept until it is written to metrics."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from naiad.outputs import RequestOutput, Timings
from naiad.sequence import EngineRequest, FinishReason


@dataclass(slots=True)
class Ended:
    """A sequence or beam search that the engine had accepted and that has ended.

    Attributes:
        reason: finish reason; for a search the reason of its best beam.
        latency_s: seconds from its arrival at the model.
        timings: the engine's timings; if the arrival time is 0, none are known.
        num_output_tokens: number of new tokens; for a search those of all its beams.
        num_sequences: number of sequences requested for its prompt; 0 for all of them but the first.
    """

    reason: FinishReason
    latency_s: float
    timings: Timings
    num_prompt_tokens: int
    num_output_tokens: int
    num_sequences: int

    @property
    def has_begun(self) -> bool:
        """Whether it has generated a token."""
        return self.timings.first_token_s > 0 or self.num_output_tokens > 0


@dataclass(slots=True)
class ObservationBatch:
    """The observations since the last batch.

    Attributes:
        first_token_s: for each sequence, seconds from arrival to the first token.
        gaps: for each output, the mean seconds between its tokens, and the number of tokens.
        ended: sequences and searches that have ended.
    """

    first_token_s: list[float] = field(default_factory=list)
    gaps: list[tuple[float, int]] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)


@dataclass(slots=True)
class _Open:
    """A sequence, or a beam search with several ids, that has not ended."""

    arrival_s: float
    num_prompt_tokens: int
    num_sequences: int
    num_open_ids: int
    num_output_tokens: int = 0
    last_token_s: float | None = None
    reason: FinishReason | None = None


class Observations:
    """Collects observations from several threads; one thread takes them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Start empty.

        Args:
            clock: returns the time in seconds; latencies are measured by it.
        """
        self._clock = clock
        self._lock = threading.Lock()
        self._batch = ObservationBatch()
        self._open: dict[int, _Open] = {}

    def begin(self, requests: Iterable[EngineRequest], num_sequences: int) -> None:
        """Start to observe requests that are submitted to the engine, each for `num_sequences` sequences."""
        now_s = self._clock()
        with self._lock:
            for request in requests:
                ids, num_tokens = request.sequence_ids, len(request.prompt_token_ids)
                if request.beam is not None:
                    search = _Open(now_s, num_tokens, num_sequences, len(ids))
                    self._open.update(dict.fromkeys(ids, search))
                    continue
                for index, sequence_id in enumerate(ids):
                    self._open[sequence_id] = _Open(now_s, num_tokens, 0 if index else num_sequences, 1)

    def take_outputs(self, outputs: Iterable[RequestOutput]) -> None:
        """Observe the engine's outputs."""
        now_s = self._clock()
        with self._lock:
            for output in outputs:
                known = self._open.get(output.sequence_id)
                if known is None:
                    continue
                self._take_tokens(known, len(output.token_ids), now_s)
                if output.finish_reason is not None:
                    del self._open[output.sequence_id]
                    self._end(known, output.finish_reason, output.timings, now_s)

    def lose(self, sequence_ids: Collection[int] | None = None) -> None:
        """Record that these sequences (None: all) have ended with an error, without further outputs."""
        now_s = self._clock()
        with self._lock:
            ids = self._open.keys() if sequence_ids is None else self._open.keys() & sequence_ids
            for known in [self._open.pop(sequence_id) for sequence_id in list(ids)]:
                self._end(known, FinishReason.ERROR, Timings(), now_s)

    def forget(self, requests: Iterable[EngineRequest]) -> None:
        """Drop requests that the engine did not accept."""
        with self._lock:
            for request in requests:
                for sequence_id in request.sequence_ids:
                    self._open.pop(sequence_id, None)

    def take(self) -> ObservationBatch:
        """Return the observations since the last call."""
        with self._lock:
            taken, self._batch = self._batch, ObservationBatch()
        return taken

    def _take_tokens(self, known: _Open, num_tokens: int, now_s: float) -> None:
        if not num_tokens:
            return
        known.num_output_tokens += num_tokens
        num_gaps = num_tokens
        if known.last_token_s is None:
            self._batch.first_token_s.append(now_s - known.arrival_s)
            known.last_token_s = now_s
            num_gaps -= 1
        if num_gaps:
            self._batch.gaps.append(((now_s - known.last_token_s) / num_gaps, num_gaps))
        known.last_token_s = now_s

    def _end(self, known: _Open, reason: FinishReason, timings: Timings | None, now_s: float) -> None:
        known.num_open_ids -= 1
        known.reason = known.reason or reason
        if known.num_open_ids or timings is None:
            return
        ended = Ended(
            reason=known.reason,
            latency_s=now_s - known.arrival_s,
            timings=timings,
            num_prompt_tokens=known.num_prompt_tokens,
            num_output_tokens=known.num_output_tokens,
            num_sequences=known.num_sequences,
        )
        self._batch.ended.append(ended)


class ForwardedObservations:
    """Collects the batches of other clients until one thread takes them."""

    def __init__(self) -> None:
        """Start empty."""
        self._lock = threading.Lock()
        self._batch = ObservationBatch()

    def add(self, batch: ObservationBatch) -> None:
        """Add a batch."""
        with self._lock:
            self._batch.first_token_s += batch.first_token_s
            self._batch.gaps += batch.gaps
            self._batch.ended += batch.ended

    def take(self) -> ObservationBatch:
        """Return what has been added since the last call."""
        with self._lock:
            taken, self._batch = self._batch, ObservationBatch()
        return taken
