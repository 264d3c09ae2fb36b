"""The engine process's main thread: take messages, compute a step, send each client its outputs."""

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
    AskSnapshot,
    Checkpoint,
    ClientMessage,
    Drain,
    Ready,
    SnapshotTaken,
    StartFailed,
    StepDone,
    StopServing,
    UsageReport,
    split_outputs,
)
from naiad.engine_process.serving.compiling import CompilingRequests
from naiad.engine_process.serving.compiling_view import add_compiling_rows, add_compiling_stats
from naiad.engine_process.serving.connections import EXIT_FAILED, Connection, ConnectionEvent, Connections
from naiad.engine_process.serving.queue_gate import QueueGate, QueueLimits
from naiad.engine_process.serving.usage_reports import UsageReports
from naiad.errors import NOT_STARTED, NaiadError, StartupError, UnavailableError, place_of
from naiad.grammar import Grammars
from naiad.outputs import EngineStats, RequestOutput, ServedModel, Timings, error_output
from naiad.sequence import EngineRequest, FinishReason
from naiad.snapshot import EngineSnapshot
from naiad.usage import TenantUsage

EXIT_START_FAILED = 3

_FLUSH_S = 2.0
_FIRST_CONNECTION_S = 10.0
# Number of new objects that triggers a collection; a step makes a few hundred, the default is 700.
_GC_THRESHOLD = 20_000

logger = logging.getLogger(__name__)


class ServedEngine(Protocol):
    """The part of an engine that the loop uses, such as `naiad.engine.Engine`."""

    @property
    def max_model_len(self) -> int:
        """Maximum number of prompt and output tokens together."""

    @property
    def model_config(self) -> ServedModel:
        """The checkpoint's configuration."""

    @property
    def grammars(self) -> Grammars | None:
        """Compiles the grammars of requests; None: the engine refuses such requests."""

    @property
    def has_work(self) -> bool:
        """Whether there is anything to compute."""

    @property
    def num_waiting_tokens(self) -> int:
        """Number of known tokens of waiting sequences."""

    def add_request(self, request: EngineRequest) -> None:
        """Accept all sequences of a request, or raise a `NaiadError`."""

    def abort(self, sequence_id: int) -> RequestOutput | None:
        """Abort a sequence now; return its last output, or None if there is no such sequence."""

    def step(self) -> list[RequestOutput]:
        """Compute one step."""

    def stats(self) -> EngineStats:
        """A copy of the gauges as they are now."""

    def usages(self) -> list[TenantUsage]:
        """What each tenant has used until now."""

    def snapshot(self) -> EngineSnapshot:
        """What the engine is doing now."""


class KVEvents(Protocol):
    """Publishes changes of the prefix cache, such as `KVEventPublisher`."""

    @property
    def num_published(self) -> int:
        """Number of changes that were published."""

    @property
    def num_dropped(self) -> int:
        """Number of changes that were dropped."""

    def flush(self) -> None:
        """Publish the changes since the last call, without waiting for anything."""

    def wait_s(self) -> float | None:
        """How long `flush` may be put off; None: until there are changes."""

    def close(self) -> None:
        """End with what is pending."""


class EngineLoop:
    """Serves the sequences of all connections.

    Each client chooses the ids of its sequences; inside the engine they have ids chosen by the loop.
    Every accepted sequence ends with exactly one output that has a finish reason.
    """

    def __init__(
        self,
        engine: ServedEngine,
        connections: Connections,
        checkpoint: Checkpoint,
        usage_file: Path | None = None,
        kv_events: KVEvents | None = None,
    ) -> None:
        """Serve `connections` from `engine`, which has loaded `checkpoint`; a file gets what tenants use."""
        self._engine = engine
        self._checkpoint = checkpoint
        self._created_s, self._started_s = int(time.time()), time.monotonic()
        self._connections = connections
        self._sequences: dict[int, tuple[Connection, int]] = {}
        self._engine_ids: dict[tuple[Connection, int], int] = {}
        self._next_engine_id = 1
        self._outbox: dict[Connection, list[RequestOutput]] = {}
        self._watchers: list[Connection] = []
        self._compiling: CompilingRequests | None = None
        if engine.grammars is not None:
            self._compiling = CompilingRequests(engine.grammars, self._is_live, connections.inbox.wake)
        self._usage = UsageReports(engine.usages, checkpoint.served_name, usage_file)
        self._kv_events = kv_events
        self._is_draining = False
        self._stop_timeout_s = 0.0
        self._stop_deadline_s = math.inf

    def run(self) -> None:
        """Serve until the owner has sent `Drain` and all sequences have ended."""
        while self._sequences or not self._is_draining:
            for connection, item in self._connections.inbox.take(self._wait_s()):
                self._handle(connection, item)
            if self._compiling is not None:
                self._take_compiled(self._compiling)
            if self._watchers:
                self._show()
            if time.monotonic() >= self._stop_deadline_s:
                self._end_unfinished()
            if self._engine.has_work:
                for output in self._engine.step():
                    self._route(output)
            self._connections.gate.arrived([], self._num_waiting_tokens)
            if self._kv_events is not None:
                self._kv_events.flush()
            self._publish(self._stats())
            # Also while all of them wait for their grammars: the owner sees that this loop lives.
            usages = self._usage.take(bool(self._sequences))
            if usages is not None:
                self._report(usages)
        self._usage.flush()

    def _wait_s(self) -> float | None:
        """How long to wait for messages; None: until there is one."""
        if self._engine.has_work:
            return 0
        parts = (self._usage, self._compiling, self._kv_events)
        waits = [each.wait_s() for each in parts if each is not None]
        if self._sequences and self._stop_deadline_s < math.inf:
            waits.append(max(0.0, self._stop_deadline_s - time.monotonic()))
        return min((each for each in waits if each is not None), default=None)

    def fail_all(self) -> None:
        """Answer every live sequence with an error, without using the engine."""
        for connection, sequence_id in list(self._engine_ids):
            failed = error_output(sequence_id, "INTERNAL", "the engine failed", Timings())
            self._outbox[connection].append(failed)
        for connection, outputs in self._outbox.items():
            if outputs:
                self._connections.send(connection, StepDone(outputs, connection.last_stats or EngineStats()))

    def _handle(self, connection: Connection, item: ClientMessage | ConnectionEvent) -> None:
        match item:
            case ConnectionEvent.OPENED:
                self._open(connection)
            case ConnectionEvent.CLOSED:
                self._close(connection)
            case AddRequests(requests):
                for request in requests:
                    self._add(connection, request)
                self._connections.gate.arrived(requests, self._num_waiting_tokens)
            case Abort(sequence_ids):
                for sequence_id in sequence_ids:
                    self._abort(connection, sequence_id)
            case Drain():
                self._is_draining = True
            case StopServing(timeout_s):
                self._stop_serving(timeout_s)
            case AskSnapshot():
                self._watchers.append(connection)

    def _open(self, connection: Connection) -> None:
        self._outbox[connection] = []
        connection.last_stats = self._stats()
        ready = Ready(
            checkpoint=self._checkpoint,
            created_s=self._created_s,
            max_model_len=self._engine.max_model_len,
            vocab_size=self._engine.model_config.vocab_size,
            eos_token_ids=list(self._engine.model_config.eos_token_ids),
            max_num_seqs=connection.last_stats.max_num_seqs,
            stats=connection.last_stats,
            tells_snapshots=True,
            started_s=self._started_s,
        )
        self._connections.send(connection, ready)

    def _close(self, connection: Connection) -> None:
        for owner, sequence_id in list(self._engine_ids):
            if owner is connection:
                self._engine.abort(self._forget(connection, sequence_id))
        self._outbox.pop(connection, None)

    def _add(self, connection: Connection, request: EngineRequest) -> None:
        keys = [(connection, sequence_id) for sequence_id in request.sequence_ids]
        if not self._engine_ids.keys().isdisjoint(keys):
            logger.error("dropped a connection that used a live sequence id again")
            self._connections.gate.leave(len(keys))
            connection.drop()
            return
        first_id = self._next_engine_id
        self._next_engine_id += len(keys)
        engine_ids = range(first_id, self._next_engine_id)
        request = msgspec.structs.replace(request, sequence_id=first_id, sibling_ids=tuple(engine_ids[1:]))
        spec, compiling = request.params.grammar, self._compiling
        # Held until the engine has taken the request.
        grammar = None if spec is None or compiling is None else compiling.find(spec)
        waits = spec is not None and compiling is not None and grammar is None
        try:
            if not waits:
                self._engine.add_request(request)
        except NaiadError as error:
            self._refuse(keys, error)
            return
        for key, engine_id in zip(keys, engine_ids, strict=True):
            self._engine_ids[key] = engine_id
            self._sequences[engine_id] = key
        if waits and compiling is not None:
            compiling.add(request)

    def _is_live(self, request: EngineRequest) -> bool:
        return any(each in self._sequences for each in request.sequence_ids)

    def _take_compiled(self, compiling: CompilingRequests) -> None:
        """Pass on the requests whose grammars are compiled, and answer those that are refused or late."""
        for done in compiling.take_done():
            # Sequences that were aborted meanwhile have been answered.
            live = [each for each in done.request.sequence_ids if each in self._sequences]
            if not live:
                continue
            error = done.error
            try:
                if error is None:
                    self._engine.add_request(done.request)
            except NaiadError as refused:
                error = refused
            if error is not None:
                self._answer(live, error_output(0, error.status, str(error)))
                continue
            for engine_id in set(done.request.sequence_ids).difference(live):
                self._engine.abort(engine_id)
        for request in compiling.take_late():
            live = [each for each in request.sequence_ids if each in self._sequences]
            late = error_output(0, UnavailableError.status, NOT_STARTED, Timings())
            late.finish_reason = FinishReason.TIMEOUT
            self._answer(live, late)

    def _answer(self, engine_ids: Sequence[int], output: RequestOutput) -> None:
        """End sequences that are not in the engine."""
        for engine_id in engine_ids:
            self._route(msgspec.structs.replace(output, sequence_id=engine_id))

    def _refuse(self, keys: Sequence[tuple[Connection, int]], error: NaiadError) -> None:
        for connection, sequence_id in keys:
            self._outbox[connection].append(error_output(sequence_id, error.status, str(error)))
        self._connections.gate.leave(len(keys))

    def _abort(self, connection: Connection, sequence_id: int) -> None:
        engine_id = self._engine_ids.get((connection, sequence_id))
        if engine_id is not None:
            # Answered here because there may be no further step.
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
            return  # aborted and answered then, or its connection is closed
        connection, output.sequence_id = key
        self._outbox[connection].append(output)
        if output.finish_reason is not None:
            self._forget(*key)

    def _forget(self, connection: Connection, sequence_id: int) -> int:
        engine_id = self._engine_ids.pop((connection, sequence_id))
        del self._sequences[engine_id]
        if self._compiling is not None:
            self._compiling.leave(engine_id)
        self._connections.gate.leave()
        return engine_id

    @property
    def _num_waiting_tokens(self) -> int:
        """Number of known tokens of sequences that wait, in the engine or for a grammar."""
        num_compiling = 0 if self._compiling is None else self._compiling.num_tokens
        return self._engine.num_waiting_tokens + num_compiling

    def _stats(self) -> EngineStats:
        stats = self._engine.stats()
        if self._kv_events is not None:
            stats.total_kv_events = self._kv_events.num_published
            stats.total_dropped_kv_events = self._kv_events.num_dropped
        return stats if self._compiling is None else add_compiling_stats(stats, self._compiling)

    def _show(self) -> None:
        """Send one snapshot to everybody who has asked."""
        snapshot, watchers = self._engine.snapshot(), self._watchers
        if self._compiling is not None:
            snapshot = add_compiling_rows(snapshot, self._compiling)
        self._watchers = []
        for watcher in watchers:
            owners = {row.sequence_id: self._sequences.get(row.sequence_id) for row in snapshot.rows}
            own_ids = {each: key[1] for each, key in owners.items() if key is not None and key[0] is watcher}
            self._connections.send(watcher, SnapshotTaken(snapshot, own_ids))

    def _report(self, usages: list[TenantUsage]) -> None:
        for connection in self._outbox:
            if connection.is_owner:
                self._connections.send(connection, UsageReport(usages))

    def _publish(self, stats: EngineStats) -> None:
        for connection, outputs in self._outbox.items():
            # Without outputs only the owner needs the stats, for its metrics.
            if outputs or (connection.is_owner and stats != connection.last_stats):
                for part in split_outputs(outputs):
                    self._connections.send(connection, StepDone(part, stats))
                connection.last_stats = stats
                self._outbox[connection] = []


def serve(
    engine_factory: Callable[[], ServedEngine],
    socket_path: Path,
    parent_pid: int,
    limits: QueueLimits,
    checkpoint: Checkpoint,
    usage_file: Path | None = None,
    kv_events: KVEvents | None = None,
) -> NoReturn:
    """Run the engine process: open the socket, build the engine, run the loop. Never returns.

    Exit codes: 0 drained, or the parent or owner is gone; 3 the engine could not start;
    4 it failed; 143 SIGTERM.

    Args:
        engine_factory: builds and warms up the engine, which may take minutes.
        socket_path: where to listen, as in `Connections`.
        parent_pid: the process to exit with, as in `Connections`.
        limits: limits of the queue.
        checkpoint: what the engine serves.
        usage_file: gets what tenants use; None: nothing is written.
        kv_events: publishes changes of the engine's prefix cache; None: nothing does.
    """
    # Ctrl-C reaches the terminal's whole process group; the process that drains the server ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    connections = Connections(socket_path, parent_pid, QueueGate(limits))
    # What is imported meanwhile stays, and to look through it again and again takes a tenth of the start.
    gc.disable()
    try:
        engine = engine_factory()
    except StartupError as error:
        logger.error("the engine can not start: %s", error)
        _refuse_start(connections, str(error))
    except Exception as error:
        logger.exception("the engine can not start")
        _refuse_start(connections, f"internal error while starting: {type(error).__name__}")
    # Everything allocated until now lives as long as the process: the collector need not look at it.
    gc.collect()
    gc.freeze()
    gc.enable()
    gc.set_threshold(_GC_THRESHOLD)
    loop = EngineLoop(engine, connections, checkpoint, usage_file, kv_events)
    exit_code = 0
    try:
        loop.run()
    except Exception as error:  # noqa: BLE001 — whatever it is, the requests are answered
        logger.error("the engine loop failed: %s", place_of(error))
        loop.fail_all()
        exit_code = EXIT_FAILED
    if kv_events is not None:
        kv_events.close()
    connections.flush(_FLUSH_S)
    connections.leave(exit_code)


def _refuse_start(connections: Connections, message: str) -> NoReturn:
    """Report the failure to every client, waiting a while for the owner to connect, and exit."""
    deadline = time.monotonic() + _FIRST_CONNECTION_S
    is_reported = False
    while not is_reported and time.monotonic() < deadline:
        for connection, item in connections.inbox.take(deadline - time.monotonic()):
            if item is ConnectionEvent.OPENED:
                connections.send(connection, StartFailed(message))
                is_reported |= connection.is_owner
    connections.flush(_FLUSH_S)
    connections.leave(EXIT_START_FAILED)
