"""Requests that wait for their grammars, which other threads compile."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import math
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from msgspec.structs import replace

from naiad.engine_process.serving.tenant_turns import TenantTurns
from naiad.errors import InternalError, NaiadError, place_of
from naiad.grammar import CompiledGrammar, Grammars
from naiad.grammar.limits import MAX_SMALL_SOURCE_BYTES
from naiad.sequence import EngineRequest, GrammarSpec
from naiad.snapshot import SequenceRow, tenant_label

# Small grammars never wait behind large ones, each of which may take seconds.
_NUM_THREADS, _NUM_THREADS_FOR_LARGE = 2, 1
# Steps go first where cores are few.
_NICENESS = 5

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Entry:
    """A request, and its grammar in the making."""

    request: EngineRequest
    arrival_s: float
    compiled: Future[CompiledGrammar | None]

    @property
    def deadline_s(self) -> float:
        """On the clock of `arrival_s`."""
        return self.arrival_s + (math.inf if self.request.timeout_s is None else self.request.timeout_s)


@dataclass(slots=True, frozen=True)
class CompiledRequest:
    """A request that waits no longer.

    Attributes:
        request: with what is left of its time.
        grammar: to be held until the engine has taken the request; None: there is an error, or nobody waits
            for the request any more.
        error: why the grammar is refused.
    """

    request: EngineRequest
    grammar: CompiledGrammar | None
    error: NaiadError | None


class CompilingRequests:
    """Compiles the grammars of requests in other threads. The engine's thread uses it.

    Thousands may wait: what each step asks for takes no longer the more there are.

    Attributes:
        num_tokens: prompt tokens of the sequences that wait.
    """

    def __init__(
        self,
        grammars: Grammars,
        is_wanted: Callable[[EngineRequest], bool],
        wake: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start without threads.

        Args:
            grammars: compiles.
            is_wanted: whether somebody still waits for a request; any thread calls it.
            wake: wakes the engine's thread; any thread calls it.
            clock: returns the time in seconds.
        """
        self._grammars = grammars
        self._is_wanted = is_wanted
        self._wake = wake
        self._clock = clock
        self.num_tokens = 0
        # Of each sequence that waits.
        self._waiting: dict[int, _Entry] = {}
        # By the request's first id, as are those below.
        self._entries: dict[int, _Entry] = {}
        # Threads that compile append to it.
        self._done: deque[int] = deque()
        self._deadlines: list[tuple[float, int]] = []
        self._small = TenantTurns[CompiledGrammar | None](_NUM_THREADS, "grammar", _be_nice)
        self._large = TenantTurns[CompiledGrammar | None](_NUM_THREADS_FOR_LARGE, "large-grammar", _be_nice)

    def find(self, spec: GrammarSpec) -> CompiledGrammar | None:
        """Return a grammar that is compiled; None if it is not."""
        return self._grammars.find(spec)

    def add(self, request: EngineRequest) -> None:
        """Compile a request's grammar."""
        spec = request.params.grammar
        assert spec is not None
        is_small = len(spec.source) <= MAX_SMALL_SOURCE_BYTES
        turns = self._small if is_small else self._large
        future = turns.submit(_label(request), partial(self._compile, request, spec))
        entry = _Entry(request, self._clock(), future)
        self._entries[request.sequence_id] = entry
        self._waiting.update(dict.fromkeys(request.sequence_ids, entry))
        self.num_tokens += len(request.sequence_ids) * len(request.prompt_token_ids)
        if entry.deadline_s < math.inf:
            heapq.heappush(self._deadlines, (entry.deadline_s, request.sequence_id))
        future.add_done_callback(partial(self._end, request.sequence_id))

    @property
    def num_sequences(self) -> int:
        """How many sequences wait."""
        return len(self._waiting)

    def leave(self, sequence_id: int) -> None:
        """Count a sequence no longer: it has ended, or has been passed on."""
        entry = self._waiting.pop(sequence_id, None)
        if entry is not None:
            self.num_tokens -= len(entry.request.prompt_token_ids)

    def wait_s(self) -> float | None:
        """Seconds until the next deadline; None: there is none."""
        while self._deadlines and self._deadlines[0][1] not in self._entries:
            heapq.heappop(self._deadlines)
        return max(0.0, self._deadlines[0][0] - self._clock()) if self._deadlines else None

    def take_done(self) -> list[CompiledRequest]:
        """Remove the requests whose grammars are compiled or refused."""
        done = []
        while self._done:
            entry = self._remove(self._done.popleft())
            if entry is not None:
                done.append(self._result(entry))
        return done

    def take_late(self) -> list[EngineRequest]:
        """Remove the requests whose deadlines have passed."""
        now, late = self._clock(), []
        while self._deadlines and self._deadlines[0][0] <= now:
            entry = self._remove(heapq.heappop(self._deadlines)[1])
            if entry is not None:
                late.append(entry.request)
        return late

    def rows(self, num_rows: int) -> list[SequenceRow]:
        """Describe the sequences that wait, this many at most."""
        now = self._clock()
        first = itertools.islice(self._waiting.items(), num_rows)
        return [_row(entry, sequence_id, now) for sequence_id, entry in first]

    def num_by_tenant(self) -> Counter[str]:
        """How many sequences of each tenant wait, by the tenant's label."""
        return Counter(_label(entry.request) for entry in self._waiting.values())

    def _end(self, request_id: int, _future: Future[CompiledGrammar | None]) -> None:
        self._done.append(request_id)
        self._wake()

    def _remove(self, request_id: int) -> _Entry | None:
        entry = self._entries.pop(request_id, None)
        if entry is not None:
            for sequence_id in entry.request.sequence_ids:
                self.leave(sequence_id)
        return entry

    def _compile(self, request: EngineRequest, spec: GrammarSpec) -> CompiledGrammar | None:
        return self._grammars.get(spec) if self._is_wanted(request) else None

    def _result(self, entry: _Entry) -> CompiledRequest:
        request, error = entry.request, entry.compiled.exception()
        if request.timeout_s is not None:
            request = replace(request, timeout_s=max(0.0, entry.deadline_s - self._clock()))
        if error is None:
            return CompiledRequest(request, entry.compiled.result(), None)
        if not isinstance(error, NaiadError):
            logger.error("a grammar can not be compiled: %s", place_of(error))
            error = InternalError("the grammar can not be compiled")
        return CompiledRequest(request, None, error)


def _label(request: EngineRequest) -> str:
    return tenant_label(request.cache_salt if request.tenant is None else request.tenant)


def _row(entry: _Entry, sequence_id: int, now_s: float) -> SequenceRow:
    request = entry.request
    return SequenceRow(
        sequence_id=sequence_id,
        tenant=_label(request),
        state="compiling",
        priority=request.params.priority,
        num_prompt_tokens=len(request.prompt_token_ids),
        num_computed_tokens=0,
        num_output_tokens=0,
        max_tokens=request.params.max_tokens,
        num_cached_tokens=0,
        num_preemptions=0,
        wait_s=max(0.0, now_s - entry.arrival_s),
        run_s=0.0,
    )


def _be_nice() -> None:
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
