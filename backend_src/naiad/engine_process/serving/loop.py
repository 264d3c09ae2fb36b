"""The engine process's main thread: inbox → step → one message a step to each door."""

from __future__ import annotations

import gc
import logging
import math
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn, Protocol

import msgspec

from naiad.engine_process.protocol import (
    Abort,
    AddRequests,
    ClientMessage,
    Drain,
    Ready,
    StartFailed,
    StepDone,
    StopServing,
    split_outputs,
)
from naiad.engine_process.serving.connections import EXIT_FAILED, Door, DoorEvent, DoorKeeper
from naiad.engine_process.serving.queue_gate import QueueGate, QueueLimits
from naiad.errors import NaiadError, StartupError
from naiad.outputs import EngineStats, RequestOutput, Timings, error_output
from naiad.sequence import EngineRequest, FinishReason

EXIT_START_FAILED = 3

_FLUSH_S = 2.0
_FIRST_CONNECTION_S = 10.0
# Young objects seen before a collection; a step makes a few hundred, the default is 700.
_GC_THRESHOLD = 20_000

logger = logging.getLogger(__name__)


class ServedModel(Protocol):
    """What a door needs to know of the checkpoint."""

    @property
    def vocab_size(self) -> int:
        """Ids are in [0, vocab_size)."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every id that ends a text."""


class ServedEngine(Protocol):
    """What the loop needs of an engine; `naiad.engine.Engine` is one."""

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and output together."""

    @property
    def model_config(self) -> ServedModel:
        """The checkpoint's configuration."""

    @property
    def has_work(self) -> bool:
        """Whether a step would do something."""

    @property
    def num_waiting_tokens(self) -> int:
        """Known tokens of the sequences that wait."""

    def add_request(self, request: EngineRequest) -> None:
        """Take all sequences of a request, or raise a `NaiadError`."""

    def abort(self, sequence_id: int) -> RequestOutput | None:
        """End a sequence now; its last output, which no step repeats. None: no such sequence."""

    def step(self) -> list[RequestOutput]:
        """Compute one step."""

    def stats(self) -> EngineStats:
        """The gauges now, as an object of their own."""


class EngineLoop:
    """Serves the doors' sequences.

    Each door numbers its sequences itself; inside they carry numbers of the loop's own.
    Every accepted sequence ends with exactly one output that has a finish reason.
    """

    def __init__(self, engine: ServedEngine, keeper: DoorKeeper) -> None:
        """Serve the doors of `keeper` from `engine`."""
        self._engine = engine
        self._keeper = keeper
        self._sequences: dict[int, tuple[Door, int]] = {}
        self._engine_ids: dict[tuple[Door, int], int] = {}
        self._next_engine_id = 1
        self._outbox: dict[Door, list[RequestOutput]] = {}
        self._is_draining = False
        self._stop_timeout_s = 0.0
        self._stop_deadline_s = math.inf

    def run(self) -> None:
        """Serve until drained."""
        while self._sequences or not self._is_draining:
            for door, item in self._keeper.inbox.take(0 if self._engine.has_work else None):
                self._handle(door, item)
            if time.monotonic() >= self._stop_deadline_s:
                self._end_unfinished()
            if self._engine.has_work:
                for output in self._engine.step():
                    self._route(output)
                self._keeper.gate.arrived([], self._engine.num_waiting_tokens)
            self._publish(self._engine.stats())

    def fail_all(self) -> None:
        """Answer every live sequence with an error, without asking the engine for anything."""
        for door, sequence_id in list(self._engine_ids):
            self._outbox[door].append(error_output(sequence_id, "INTERNAL", "the engine failed", Timings()))
        for door, outputs in self._outbox.items():
            if outputs:
                self._keeper.send(door, StepDone(outputs, door.last_stats or EngineStats()))

    def _handle(self, door: Door, item: ClientMessage | DoorEvent) -> None:
        match item:
            case DoorEvent.OPENED:
                self._open(door)
            case DoorEvent.CLOSED:
                self._close(door)
            case AddRequests(requests):
                for request in requests:
                    self._add(door, request)
                self._keeper.gate.arrived(requests, self._engine.num_waiting_tokens)
            case Abort(sequence_ids):
                for sequence_id in sequence_ids:
                    self._abort(door, sequence_id)
            case Drain():
                self._is_draining = True
            case StopServing(timeout_s):
                self._stop_serving(timeout_s)

    def _open(self, door: Door) -> None:
        self._outbox[door] = []
        door.last_stats = self._engine.stats()
        ready = Ready(
            max_model_len=self._engine.max_model_len,
            vocab_size=self._engine.model_config.vocab_size,
            eos_token_ids=list(self._engine.model_config.eos_token_ids),
            max_num_seqs=door.last_stats.max_num_seqs,
            stats=door.last_stats,
        )
        self._keeper.send(door, ready)

    def _close(self, door: Door) -> None:
        for owner, sequence_id in list(self._engine_ids):
            if owner is door:
                self._engine.abort(self._forget(door, sequence_id))
        self._outbox.pop(door, None)

    def _add(self, door: Door, request: EngineRequest) -> None:
        keys = [(door, sequence_id) for sequence_id in request.sequence_ids]
        if not self._engine_ids.keys().isdisjoint(keys):
            logger.error("dropped a connection that used a live sequence id again")
            self._keeper.gate.leave(len(keys))
            door.drop()
            return
        first_id = self._next_engine_id
        self._next_engine_id += len(keys)
        engine_ids = range(first_id, self._next_engine_id)
        try:
            self._engine.add_request(
                msgspec.structs.replace(request, sequence_id=first_id, sibling_ids=tuple(engine_ids[1:]))
            )
        except NaiadError as error:
            self._refuse(keys, error)
            return
        for key, engine_id in zip(keys, engine_ids, strict=True):
            self._engine_ids[key] = engine_id
            self._sequences[engine_id] = key

    def _refuse(self, keys: Sequence[tuple[Door, int]], error: NaiadError) -> None:
        for door, sequence_id in keys:
            self._outbox[door].append(error_output(sequence_id, error.status, str(error)))
        self._keeper.gate.leave(len(keys))

    def _abort(self, door: Door, sequence_id: int) -> None:
        engine_id = self._engine_ids.get((door, sequence_id))
        if engine_id is not None:
            # Answered here, so that it is answered also when no step follows.
            cancelled = RequestOutput(engine_id, [], finish_reason=FinishReason.CANCELLED, timings=Timings())
            self._route(self._engine.abort(engine_id) or cancelled)

    def _stop_serving(self, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        if deadline_s < self._stop_deadline_s:
            self._stop_timeout_s, self._stop_deadline_s = timeout_s, deadline_s

    def _end_unfinished(self) -> None:
        timeout_s = round(self._stop_timeout_s, 1)
        message = f"the request did not finish in {timeout_s:g} s before the server stopped"
        if self._sequences:
            logger.warning("%d sequences end with an error: %s", len(self._sequences), message)
        for engine_id in list(self._sequences):
            ended = self._engine.abort(engine_id)
            timings = ended.timings if ended is not None else Timings()
            self._route(error_output(engine_id, "UNAVAILABLE", message, timings))

    def _route(self, output: RequestOutput) -> None:
        key = self._sequences.get(output.sequence_id)
        if key is None:
            return  # aborted: answered then, or its door is closed
        door, output.sequence_id = key
        self._outbox[door].append(output)
        if output.finish_reason is not None:
            self._forget(*key)

    def _forget(self, door: Door, sequence_id: int) -> int:
        engine_id = self._engine_ids.pop((door, sequence_id))
        del self._sequences[engine_id]
        self._keeper.gate.leave()
        return engine_id

    def _publish(self, stats: EngineStats) -> None:
        for door, outputs in self._outbox.items():
            # The numbers alone are for the owner, who shows them; others would be woken for nothing.
            if outputs or (door.is_owner and stats != door.last_stats):
                for part in split_outputs(outputs):
                    self._keeper.send(door, StepDone(part, stats))
                door.last_stats = stats
                self._outbox[door] = []


def serve(
    engine_factory: Callable[[], ServedEngine], socket_path: Path, parent_pid: int, limits: QueueLimits
) -> NoReturn:
    """Run the engine process: socket first, then the engine, then the loop. Never returns.

    Exit codes: 0 drained, or the parent or owner is gone; 3 the engine could not start;
    4 it failed; 143 SIGTERM.

    Args:
        engine_factory: builds and warms up the engine; takes as long as it takes.
        socket_path: as in `DoorKeeper`.
        parent_pid: as in `DoorKeeper`.
        limits: how much may wait.
    """
    # Ctrl-C reaches the terminal's whole group; whoever drains the server ends us then.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    keeper = DoorKeeper(socket_path, parent_pid, QueueGate(limits))
    try:
        engine = engine_factory()
    except StartupError as error:
        logger.error("the engine can not start: %s", error)
        _refuse_start(keeper, str(error))
    except Exception as error:
        logger.exception("the engine can not start")
        _refuse_start(keeper, f"internal error while starting: {type(error).__name__}")
    # What was made until now stays: no collection needs to look at it again.
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD)
    loop = EngineLoop(engine, keeper)
    exit_code = 0
    try:
        loop.run()
    except Exception:
        logger.exception("the engine loop failed")
        loop.fail_all()
        exit_code = EXIT_FAILED
    keeper.flush(_FLUSH_S)
    keeper.leave(exit_code)


def _refuse_start(keeper: DoorKeeper, message: str) -> NoReturn:
    """Tell every door that is there, waiting a while for the owner's, and exit."""
    deadline = time.monotonic() + _FIRST_CONNECTION_S
    has_told = False
    while not has_told and time.monotonic() < deadline:
        for door, item in keeper.inbox.take(deadline - time.monotonic()):
            if item is DoorEvent.OPENED:
                keeper.send(door, StartFailed(message))
                has_told |= door.is_owner
    keeper.flush(_FLUSH_S)
    keeper.leave(EXIT_START_FAILED)
