"""A client of an engine that another model of the same server owns."""

from __future__ import annotations

import contextlib
import logging
import selectors
import threading
import time
from collections.abc import Callable
from pathlib import Path

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

# How often new engines are looked for: while there is none, and while there is one.
_SEARCH_S = 0.02
_LOOK_S = 0.2

logger = logging.getLogger(__name__)


class _Engine(EngineConnection):
    """One engine, seen by this client."""

    def __init__(self, path: Path) -> None:
        """Connect; raises OSError if no process listens there."""
        self.path = path
        self.made_ns = path.stat().st_mtime_ns
        self.info: Ready | None = None
        self.outstanding: set[int] = set()
        self._send_lock = threading.Lock()
        super().__init__(path)

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
        return max(serving, key=lambda each: each.made_ns, default=None)

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                self._look()
                pause_s = max(0.0, self._next_look_s - time.monotonic())
                for key, _ in self._selector.select(pause_s):
                    self._read(key.data)
        finally:
            # This also runs when a callback raises: no thread reads the engines' messages any more.
            self._closing.set()
            for engine in list(self._engines.values()):
                self._lose(engine)

    def _look(self) -> None:
        if time.monotonic() < self._next_look_s:
            return
        for path in engine_sockets(self._directory, self._model):
            if path not in self._engines:
                # An engine that was killed leaves its socket behind.
                with contextlib.suppress(OSError):
                    self._add(_Engine(path))
        self._next_look_s = time.monotonic() + (_SEARCH_S if self._newest() is None else _LOOK_S)

    def _add(self, engine: _Engine) -> None:
        with self._lock:
            self._engines[engine.path] = engine
        self._selector.register(engine, selectors.EVENT_READ, engine)

    def _read(self, engine: _Engine) -> None:
        try:
            messages = engine.receive()
        except OSError as error:
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
                    self._on_stop(request_id)
                case SnapshotTaken():
                    self._on_snapshot(message)
                case StartFailed() | Observed():
                    # The engine's owner reports the failure, and the engine closes the connection.
                    # Observations go to the owner alone.
                    continue

    def _deliver(self, engine: _Engine, message: StepDone) -> None:
        finished = [output.sequence_id for output in message.outputs if output.finish_reason is not None]
        with self._lock:
            engine.outstanding.difference_update(finished)
        self._on_outputs(message.outputs, message.stats)

    def _lose(self, engine: _Engine) -> None:
        self._selector.unregister(engine)
        with self._lock:
            del self._engines[engine.path]
            lost = sorted(engine.outstanding)
        engine.close()
        self._next_look_s = 0.0
        if lost:
            self._on_lost(lost)
