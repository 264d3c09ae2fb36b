"""A discrete-event simulation of replicas behind a router."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial

from perf.cluster.arrivals import Request
from perf.cluster.replica import Replica
from perf.cluster.replica_spec import ReplicaSpec
from perf.cluster.routers import Router

from naiad.outputs import RequestOutput
from naiad.sequence import EngineRequest, SamplingParams

# A request is sent to this many replicas at most, as by a router with two retries.
_MAX_ATTEMPTS = 3


class End(Enum):
    """How a request ended."""

    SERVED = "served"
    REFUSED = "refused"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Failure:
    """A replica dies and comes back with an empty cache.

    Attributes:
        replica: which one.
        at_s: when.
        down_s: for how long.
    """

    replica: int
    at_s: float
    down_s: float


@dataclass(slots=True)
class Outcome:
    """A request.

    Attributes:
        request: as it came.
        first_s, last_s: when its first and last token came, in seconds since it was due.
        num_tokens: tokens that came.
        num_attempts: replicas that it was sent to.
        end: how it ended; None: it has not.
        replica: where it is or was last.
    """

    request: Request
    first_s: float = math.inf
    last_s: float = math.inf
    num_tokens: int = 0
    num_attempts: int = 0
    end: End | None = None
    replica: int = -1

    @property
    def inter_token_s(self) -> float:
        """Mean time between its tokens."""
        return (self.last_s - self.first_s) / max(1, self.num_tokens - 1)

    def is_good(self, first_token_s: float, inter_token_s: float) -> bool:
        """Whether it was served within the limits."""
        return (
            self.end is End.SERVED and self.first_s <= first_token_s and self.inter_token_s <= inter_token_s
        )


@dataclass(slots=True)
class Totals:
    """What the replicas did, those that died included.

    Attributes:
        num_hit_tokens, num_queried_tokens: prompt tokens found in prefix caches, and looked up there.
        num_steps: steps computed.
        busy_s: their time.
    """

    num_hit_tokens: int = 0
    num_queried_tokens: int = 0
    num_steps: int = 0
    busy_s: float = 0.0

    def add(self, replica: Replica) -> None:
        """Add a replica's."""
        num_hit_tokens, num_queried_tokens = replica.cached_tokens
        self.num_hit_tokens += num_hit_tokens
        self.num_queried_tokens += num_queried_tokens
        self.num_steps += replica.num_steps
        self.busy_s += replica.busy_s


class Simulation:
    """Serves requests with replicas behind a router.

    If a replica dies, requests that have got a token end as failed, because their streams have begun; the
    others are sent to another replica. So are those that a full queue refuses.

    Attributes:
        outcomes: one for each request.
        totals: complete after `run`.
        now_s: the simulated time.
    """

    def __init__(
        self,
        spec: ReplicaSpec,
        router: Router,
        requests: Sequence[Request],
        failures: Sequence[Failure] = (),
    ) -> None:
        """Prepare; nothing happens before `run`.

        Args:
            spec: of every replica.
            router: knows how many replicas there are.
            requests: in any order.
            failures: which replicas die, and when.
        """
        self.outcomes = [Outcome(each) for each in requests]
        self.totals = Totals()
        self.now_s = 0.0
        self._spec = spec
        self._router = router
        self._replicas = [Replica(spec) for _ in router.num_open]
        self._open: list[set[int]] = [set() for _ in self._replicas]
        # Ordered by time, then by the order in which they were added.
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = 0
        for number, request in enumerate(requests):
            self._at(request.due_s, partial(self._send, number))
        for failure in failures:
            self._at(failure.at_s, partial(self._fail, failure))

    def run(self) -> None:
        """Let everything happen, and check the result.

        Raises:
            RuntimeError: a request has not ended, or has not what it asked for, or a replica is not empty.
        """
        while self._events:
            self.now_s, _, happen = heapq.heappop(self._events)
            happen()
        for replica in self._replicas:
            self.totals.add(replica)
        self._check()

    def _at(self, time_s: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_s, self._num_events, happen))
        self._num_events += 1

    def _send(self, number: int) -> None:
        """Send a request to the replica that the router chooses, or end it."""
        outcome, router = self.outcomes[number], self._router
        while router.alive and outcome.num_attempts < _MAX_ATTEMPTS:
            outcome.num_attempts += 1
            index = router.choose(outcome.request.prompt)
            replica = self._replicas[index]
            if replica.has_room:
                outcome.replica = index
                router.send(index)
                self._open[index].add(number)
                replica.add(_engine_request(number, outcome.request))
                self._begin_step(index)
                return
        self._end(outcome, End.REFUSED)

    def _begin_step(self, index: int) -> None:
        replica = self._replicas[index]
        if replica.is_stepping or not replica.has_work:
            return
        end_s = replica.begin_step(self.now_s)
        if end_s <= self.now_s:
            raise RuntimeError("a step took no time")
        self._at(end_s, partial(self._end_step, index, replica))

    def _end_step(self, index: int, replica: Replica) -> None:
        if self._replicas[index] is not replica:
            return  # it died during the step
        for output in replica.end_step():
            self._take(index, output)
        if self._router.wants_changes:
            self._router.take_changes(index, replica.take_changes())
        else:
            replica.take_changes()
        self._begin_step(index)

    def _take(self, index: int, output: RequestOutput) -> None:
        outcome = self.outcomes[output.sequence_id]
        if output.token_ids:
            seconds = self.now_s - outcome.request.due_s
            outcome.first_s = min(outcome.first_s, seconds)
            outcome.last_s = seconds
            outcome.num_tokens += len(output.token_ids)
        if output.finish_reason is not None:
            self._open[index].remove(output.sequence_id)
            self._router.end(index)
            self._end(outcome, End.SERVED)

    def _end(self, outcome: Outcome, end: End) -> None:
        if outcome.end is not None:
            raise RuntimeError("a request ended twice")
        outcome.end = end

    def _fail(self, failure: Failure) -> None:
        index = failure.replica
        if index not in self._router.alive:
            raise RuntimeError("a replica died twice")
        self.totals.add(self._replicas[index])
        self._replicas[index] = Replica(self._spec)
        self._router.leave(index)
        self._at(self.now_s + failure.down_s, partial(self._router.join, index))
        lost, self._open[index] = sorted(self._open[index]), set()
        for number in lost:
            if self.outcomes[number].num_tokens:
                self._end(self.outcomes[number], End.FAILED)
            else:
                self._send(number)

    def _check(self) -> None:
        for outcome in self.outcomes:
            if outcome.end is None:
                raise RuntimeError("a request has not ended")
            is_complete = outcome.num_tokens == outcome.request.num_tokens
            if outcome.end is End.SERVED and not (is_complete and 0 < outcome.first_s <= outcome.last_s):
                raise RuntimeError("a request was served without the tokens that it asked for")
            if outcome.end is End.REFUSED and outcome.num_tokens:
                raise RuntimeError("a request was refused after it had begun")
        if self._router.total_open or any(self._router.num_open) or any(self._open):
            raise RuntimeError("the router believes that requests are open")
        for replica in self._replicas:
            replica.check_empty()


def _engine_request(number: int, request: Request) -> EngineRequest:
    params = SamplingParams(max_tokens=request.num_tokens)
    return EngineRequest(sequence_id=number, prompt_token_ids=list(request.prompt), params=params)
