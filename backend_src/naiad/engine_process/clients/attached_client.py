"""A client of an engine that another model of the same server owns."""

from __future__ import annotations

import logging
import math
import selectors
import threading
import time
from collections.abc import Callable
from pathlib import Path

from naiad.engine_process.clients.callbacks import call_back, failures_of
from naiad.engine_process.clients.engine_connection import EngineConnection, ProtocolError
from naiad.engine_process.instance import engine_sockets
from naiad.engine_process.observations import ObservationBatch
from naiad.engine_process.protocol import (
    Abort,
    AskSnapshot,
    Observed,
    Ready,
    SnapshotTaken,
    StartFailed,
    StepDone,
    StopRequests,
    encode_frame,
    encode_requests,
)
from naiad.errors import EngineAwayError, UnavailableError
from naiad.outputs import EngineStats, RequestOutput
from naiad.sequence import EngineRequest

# How often engines are looked for: while there has been none for a short time, and otherwise. An engine that
# is started again comes within seconds; that of a model that was unloaded may never come.
_SEARCH_S = 0.02
_LOOK_S = 0.2
_SHORT_TIME_S = 10.0

logger = logging.getLogger(__name__)


class _Engine(EngineConnection):
    """One engine, seen by this client."""

    def __init__(self, path: Path) -> None:
        """Connect; raises OSError if no process listens there."""
        self.path = path
        self.info: Ready | None = None
        self.outstanding: set[int] = set()
        self._send_lock = threading.Lock()
        super().__init__(path)

    @property
    def started_s(self) -> float:
        """When it began to serve, in seconds of `time.monotonic`; infinitely early if it does not yet."""
        return -math.inf if self.info is None else self.info.started_s

    def send_or_hang_up(self, frame: bytes) -> None:
        """Send a frame. If the engine does not read, hang up; the receiving thread then sees the loss."""
        with self._send_lock:
            try:
                self.send(frame)
            except OSError:
                self.hang_up()


class AttachedClient:
    """Sends requests to the engine of an `llm` model. All methods may be called from any thread.

    A model that is reloaded has two engines for a while; new requests go to the newest one that serves.
    Every accepted sequence ends with one output that has a finish reason, or with a call of `on_lost`.
    If `on_outputs` raises, the sequences of those outputs are aborted and end with one more output, an
    error; whatever else comes of them is to be ignored.
    """

    def __init__(
        self,
        directory: Path,
        model: str,
        on_outputs: Callable[[list[RequestOutput], EngineStats | None], None],
        on_lost: Callable[[list[int]], None],
        on_stop: Callable[[str], None],
        on_snapshot: Callable[[SnapshotTaken], None] = lambda _: None,
    ) -> None:
        """Set up; `start` begins to look for the engine.

        Args:
            directory: the server's runtime directory.
            model: the name of the `llm` model that owns the engine.
            on_outputs: called by this client's thread with the outputs and stats of each message.
            on_lost: called by it with the unanswered sequences of an engine that is gone.
            on_stop: called by it with the id of requests that another frontend's client wants to
                cancel.
            on_snapshot: called by it with the answers to `ask_snapshot`.
        """
        self._directory = directory
        self._model = model
        self._on_outputs = on_outputs
        self._on_lost = on_lost
        self._on_stop = on_stop
        self._on_snapshot = on_snapshot
        self._lock = threading.Lock()  # guards the engines and what they have outstanding
        self._engines: dict[Path, _Engine] = {}
        self._next_look_s = 0.0
        self._last_served_s = time.monotonic()
        self._is_failing = False
        self._selector = selectors.DefaultSelector()
        self._has_found = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine-client", daemon=True)

    @property
    def info(self) -> Ready | None:
        """The newest engine's description of itself; None while none serves."""
        engine = self._newest()
        return None if engine is None else engine.info

    def start(self, patience_s: float = 0.0) -> None:
        """Start to look for engines, and wait up to `patience_s` for one that serves. To be called once."""
        self._thread.start()
        self._has_found.wait(patience_s)

    def submit(self, requests: list[EngineRequest]) -> None:
        """Send requests to the engine; each one that it refuses is answered by an error output.

        Raises:
            EngineAwayError: no engine serves now; no request was accepted.
            InternalError: a value cannot be sent; no request was accepted.
        """
        frame = encode_requests(requests)
        with self._lock:
            engine = self._newest()
            if engine is None or self._closing.is_set():
                raise EngineAwayError(
                    f"the engine of the model {self._model} does not serve now; try again in a few seconds"
                )
            engine.outstanding.update(each for request in requests for each in request.sequence_ids)
        engine.send_or_hang_up(frame)

    def abort(self, sequence_ids: list[int]) -> None:
        """Abort sequences; each that still runs is answered with `cancelled`. Others are ignored."""
        with self._lock:
            found = [
                (engine, live)
                for engine in self._engines.values()
                if (live := [each for each in sequence_ids if each in engine.outstanding])
            ]
        for engine, live in found:
            engine.send_or_hang_up(encode_frame(Abort(live)))

    def stop_others(self, request_id: str) -> None:
        """Have the engine's other clients cancel their requests of this id."""
        for engine in list(self._engines.values()):
            engine.send_or_hang_up(encode_frame(StopRequests(request_id)))

    def report(self, batch: ObservationBatch) -> None:
        """Have the engine's owner write what this client has observed; without an engine it is dropped."""
        engine = self._newest()
        if engine is not None:
            engine.send_or_hang_up(encode_frame(Observed(batch)))

    def ask_snapshot(self) -> Ready:
        """Ask the newest engine what it is doing; `on_snapshot` gets the answer, unless the engine is lost.

        Returns:
            The description of the engine that was asked.

        Raises:
            EngineAwayError: no engine serves now.
            UnavailableError: the engine is of an older release and cannot tell.
        """
        engine = self._newest()
        if engine is None or engine.info is None:
            raise EngineAwayError(
                f"the engine of the model {self._model} does not serve now; try again in a few seconds"
            )
        if not engine.info.tells_snapshots:
            raise UnavailableError(f"the engine of the model {self._model} is too old to tell what it does")
        engine.send_or_hang_up(encode_frame(AskSnapshot()))
        return engine.info

    def close(self) -> None:
        """Hang up; the engines abort this client's sequences, which are reported as lost."""
        self._closing.set()
        self._thread.join(timeout=5)
        self._selector.close()

    def _newest(self) -> _Engine | None:
        serving = [each for each in list(self._engines.values()) if each.info is not None]
        return max(serving, key=lambda each: each.started_s, default=None)

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                self._look()
                pause_s = max(0.0, self._next_look_s - time.monotonic())
                for key, _ in self._selector.select(pause_s):
                    self._read(key.data)
        finally:
            # No thread reads the engines' messages any more.
            self._closing.set()
            for engine in list(self._engines.values()):
                self._lose(engine)

    def _look(self) -> None:
        if time.monotonic() < self._next_look_s:
            return
        paths: list[Path] = []
        failure = None
        try:
            paths = engine_sockets(self._directory, self._model)
        except OSError as error:
            failure = error
        for path in paths:
            if path not in self._engines:
                failure = self._connect(path) or failure
        if failure is not None and not self._is_failing:
            logger.warning("an engine can not be looked for; this is tried again: %s", failure.strerror)
        self._is_failing = failure is not None
        self._next_look_s = time.monotonic() + self._pause_s()

    def _pause_s(self) -> float:
        """How long to wait until engines are looked for again."""
        now_s = time.monotonic()
        if self._newest() is not None:
            self._last_served_s = now_s
            return _LOOK_S
        return _SEARCH_S if now_s < self._last_served_s + _SHORT_TIME_S else _LOOK_S

    def _connect(self, path: Path) -> OSError | None:
        """Connect to an engine; return what this process or the machine lacks for it."""
        try:
            engine = _Engine(path)
        except (FileNotFoundError, ConnectionError, TimeoutError, BlockingIOError):
            # An engine that was killed leaves its socket behind; one that starts may not accept yet.
            return None
        except OSError as error:
            return error
        try:
            self._add(engine)
        except OSError as error:
            engine.close()
            return error
        return None

    def _add(self, engine: _Engine) -> None:
        self._selector.register(engine, selectors.EVENT_READ, engine)
        with self._lock:
            self._engines[engine.path] = engine

    def _read(self, engine: _Engine) -> None:
        try:
            messages = engine.receive()
        except (OSError, MemoryError) as error:
            if isinstance(error, ProtocolError):
                logger.error("%s", error)
            self._lose(engine)
            return
        for message in messages:
            match message:
                case Ready():
                    engine.info = message
                    self._has_found.set()
                case StepDone():
                    self._deliver(engine, message)
                case StopRequests(request_id):
                    call_back(self._on_stop, request_id)
                case SnapshotTaken():
                    call_back(self._on_snapshot, message)
                case StartFailed() | Observed():
                    # The engine's owner reports the failure, and the engine closes the connection.
                    # Observations go to the owner alone.
                    continue

    def _deliver(self, engine: _Engine, message: StepDone) -> None:
        finished = [output.sequence_id for output in message.outputs if output.finish_reason is not None]
        with self._lock:
            engine.outstanding.difference_update(finished)
        if not call_back(self._on_outputs, message.outputs, message.stats):
            self.abort([output.sequence_id for output in message.outputs])
            call_back(self._on_outputs, failures_of(message.outputs), None)

    def _lose(self, engine: _Engine) -> None:
        self._selector.unregister(engine)
        with self._lock:
            del self._engines[engine.path]
            lost = sorted(engine.outstanding)
        engine.close()
        self._next_look_s = 0.0
        if lost:
            call_back(self._on_lost, lost)
