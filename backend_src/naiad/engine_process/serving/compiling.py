"""Requests that wait for their grammars, which other threads compile."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from msgspec.structs import replace

from naiad.errors import InternalError, NaiadError
from naiad.grammar import CompiledGrammar, Grammars
from naiad.grammar.limits import MAX_SMALL_SOURCE_BYTES
from naiad.sequence import EngineRequest, GrammarSpec

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
    """Compiles the grammars of requests in other threads. The engine's thread uses it."""

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
        self._entries: list[_Entry] = []
        self._small = ThreadPoolExecutor(_NUM_THREADS, "grammar", initializer=_be_nice)
        self._large = ThreadPoolExecutor(_NUM_THREADS_FOR_LARGE, "large-grammar", initializer=_be_nice)

    def find(self, spec: GrammarSpec) -> CompiledGrammar | None:
        """Return a grammar that is compiled; None if it is not."""
        return self._grammars.find(spec)

    def add(self, request: EngineRequest) -> None:
        """Compile a request's grammar."""
        spec = request.params.grammar
        assert spec is not None
        is_small = len(spec.source) <= MAX_SMALL_SOURCE_BYTES
        future = (self._small if is_small else self._large).submit(self._compile, request, spec)
        self._entries.append(_Entry(request, self._clock(), future))
        future.add_done_callback(lambda _: self._wake())

    def wait_s(self) -> float | None:
        """Seconds until the next deadline; None: there is none."""
        nearest = min((each.deadline_s for each in self._entries), default=math.inf)
        return None if nearest == math.inf else max(0.0, nearest - self._clock())

    def take_done(self) -> list[CompiledRequest]:
        """Remove the requests whose grammars are compiled or refused."""
        done = [each for each in self._entries if each.compiled.done()]
        if done:
            self._entries = [each for each in self._entries if each not in done]
        return [self._result(each) for each in done]

    def take_late(self) -> list[EngineRequest]:
        """Remove the requests whose deadlines have passed."""
        now = self._clock()
        late = [each for each in self._entries if each.deadline_s <= now]
        if late:
            self._entries = [each for each in self._entries if each not in late]
        return [each.request for each in late]

    def _compile(self, request: EngineRequest, spec: GrammarSpec) -> CompiledGrammar | None:
        return self._grammars.get(spec) if self._is_wanted(request) else None

    def _result(self, entry: _Entry) -> CompiledRequest:
        request, error = entry.request, entry.compiled.exception()
        if request.timeout_s is not None:
            request = replace(request, timeout_s=max(0.0, entry.deadline_s - self._clock()))
        if error is None:
            return CompiledRequest(request, entry.compiled.result(), None)
        if not isinstance(error, NaiadError):
            logger.error("a grammar can not be compiled", exc_info=error)
            error = InternalError("the grammar can not be compiled")
        return CompiledRequest(request, None, error)


def _be_nice() -> None:
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
