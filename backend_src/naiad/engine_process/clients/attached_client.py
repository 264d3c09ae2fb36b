"""A door to an engine that another model of the same server owns."""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from naiad.engine_process.instance import engine_sockets_of
from naiad.engine_process.protocol import (
    Abort,
    FrameBuffer,
    Ready,
    StartFailed,
    StepDone,
    StopRequests,
    encode_frame,
    encode_requests,
    engine_message_decoder,
)
from naiad.errors import EngineAwayError
from naiad.outputs import EngineStats, RequestOutput
from naiad.sequence import EngineRequest

_READ_BYTES = 1 << 18
_SEND_TIMEOUT_S = 5.0
# How often new engines are looked for: while there is none, and while there is one.
_SEARCH_S = 0.02
_LOOK_S = 0.2

logger = logging.getLogger(__name__)


class _Connection:
    """One engine, seen through this door."""

    def __init__(self, path: Path) -> None:
        """Connect; OSError when nobody listens there."""
        self.path = path
        self.made_ns = path.stat().st_mtime_ns
        self.frames = FrameBuffer()
        self.info: Ready | None = None
        self.outstanding: set[int] = set()
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._send_lock = threading.Lock()
        try:
            self.socket.settimeout(_SEND_TIMEOUT_S)
            self.socket.connect(str(path))
        except OSError:
            self.socket.close()
            raise

    def send(self, frame: bytes) -> None:
        """Send, or hang up when the engine does not read; the loss is then seen by the reader."""
        with self._send_lock:
            try:
                self.socket.sendall(frame, socket.MSG_NOSIGNAL)
            except OSError:
                with contextlib.suppress(OSError):
                    self.socket.shutdown(socket.SHUT_RDWR)


class DoorClient:
    """Hands sequences to the engine of an `llm` model. All methods may be called from any thread.

    A reloaded model has two engines for a while: what is new goes to the newest that serves. Every
    accepted sequence ends with one output that has a finish reason, or with a loss.
    """

    def __init__(
        self,
        directory: Path,
        model: str,
        on_outputs: Callable[[list[RequestOutput], EngineStats | None], None],
        on_lost: Callable[[list[int]], None],
        on_stop: Callable[[str], None],
    ) -> None:
        """Set up; `start` begins to look for the engine.

        Args:
            directory: the server's runtime directory.
            model: the name of the `llm` model that owns the engine.
            on_outputs: called by the door's thread with each message of an engine.
            on_lost: called by it with the sequences of an engine that is gone.
            on_stop: called by it with the id of requests that are to be cancelled, as a client of
                another door said.
        """
        self._directory = directory
        self._model = model
        self._on_outputs = on_outputs
        self._on_lost = on_lost
        self._on_stop = on_stop
        self._lock = threading.Lock()  # guards the connections and what they have outstanding
        self._connections: dict[Path, _Connection] = {}
        self._next_look_s = 0.0
        self._selector = selectors.DefaultSelector()
        self._has_found = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine-door", daemon=True)

    @property
    def info(self) -> Ready | None:
        """What the engine said of itself; None while none serves."""
        connection = self._newest()
        return None if connection is None else connection.info

    def start(self, patience_s: float = 0.0) -> None:
        """Look for the engine from now on, and wait so long for one that serves. Once."""
        self._thread.start()
        self._has_found.wait(patience_s)

    def submit(self, requests: list[EngineRequest]) -> None:
        """Hand rows to the engine; those it refuses are answered by an error output each.

        Raises:
            EngineAwayError: no engine now; none of the rows was taken.
            InternalError: a value of theirs can not be sent; none of the rows was taken.
        """
        frame = encode_requests(requests)
        with self._lock:
            connection = self._newest()
            if connection is None or self._closing.is_set():
                raise EngineAwayError(
                    f"the engine of the model {self._model} does not serve now; try again in a few seconds"
                )
            connection.outstanding.update(each for request in requests for each in request.sequence_ids)
        connection.send(frame)

    def abort(self, sequence_ids: list[int]) -> None:
        """End sequences; each that still runs is answered with `cancelled`. Others are ignored."""
        with self._lock:
            found = [
                (connection, live)
                for connection in self._connections.values()
                if (live := [each for each in sequence_ids if each in connection.outstanding])
            ]
        for connection, live in found:
            connection.send(encode_frame(Abort(live)))

    def stop_others(self, request_id: str) -> None:
        """Tell the engine's other doors to cancel requests of this id."""
        for connection in list(self._connections.values()):
            connection.send(encode_frame(StopRequests(request_id)))

    def close(self) -> None:
        """Hang up; the engines end what this door has outstanding, and it is reported as lost."""
        self._closing.set()
        self._thread.join(timeout=5)
        self._selector.close()

    def _newest(self) -> _Connection | None:
        serving = [each for each in list(self._connections.values()) if each.info is not None]
        return max(serving, key=lambda each: each.made_ns, default=None)

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                self._look()
                pause_s = max(0.0, self._next_look_s - time.monotonic())
                for key, _ in self._selector.select(pause_s):
                    self._read(key.data)
        finally:
            # Also when a callback raised: nobody would read the engines' messages any more.
            self._closing.set()
            for connection in list(self._connections.values()):
                self._lose(connection)

    def _look(self) -> None:
        if time.monotonic() < self._next_look_s:
            return
        for path in engine_sockets_of(self._directory, self._model):
            if path not in self._connections:
                # One that was killed leaves its socket behind, where nobody listens.
                with contextlib.suppress(OSError):
                    self._add(_Connection(path))
        self._next_look_s = time.monotonic() + (_SEARCH_S if self._newest() is None else _LOOK_S)

    def _add(self, connection: _Connection) -> None:
        with self._lock:
            self._connections[connection.path] = connection
        self._selector.register(connection.socket, selectors.EVENT_READ, connection)

    def _read(self, connection: _Connection) -> None:
        try:
            data = connection.socket.recv(_READ_BYTES)
            messages = [engine_message_decoder.decode(body) for body in connection.frames.feed(data)]
        except OSError:
            data = b""
        except (ValueError, msgspec.DecodeError) as error:
            logger.error("the engine process does not keep to the protocol: %s", error)
            data = b""
        if not data:
            self._lose(connection)
            return
        for message in messages:
            match message:
                case Ready():
                    connection.info = message
                    self._has_found.set()
                case StepDone():
                    self._deliver(connection, message)
                case StopRequests(request_id):
                    self._on_stop(request_id)
                case StartFailed():
                    # Its owner says why; it hangs up at once.
                    continue

    def _deliver(self, connection: _Connection, message: StepDone) -> None:
        finished = [output.sequence_id for output in message.outputs if output.finish_reason is not None]
        with self._lock:
            connection.outstanding.difference_update(finished)
        self._on_outputs(message.outputs, message.stats)

    def _lose(self, connection: _Connection) -> None:
        self._selector.unregister(connection.socket)
        with self._lock:
            del self._connections[connection.path]
            lost = sorted(connection.outstanding)
        connection.socket.close()
        self._next_look_s = 0.0
        if lost:
            self._on_lost(lost)
