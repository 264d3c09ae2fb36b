"""The clients of an engine in this process: those of the servers, over frames that pass at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol
from unittest.mock import patch

from naiad.config import EngineConfig
from naiad.engine_process import ClientTimings, EngineClient
from naiad.engine_process.clients import attached_client, engine_client
from naiad.engine_process.clients.attached_client import AttachedClient
from naiad.engine_process.clients.engine_child import OwnersMessage
from naiad.engine_process.protocol import EngineMessage, Ready
from naiad.outputs import EngineStats, RequestOutput


class Wire(Protocol):
    """Takes a client's frames to the engine's loop, or nowhere if the engine is gone."""

    def __call__(self, frame: bytes) -> None:
        """Send a frame."""


class Served(Protocol):
    """What a client tells, as the classes of Triton's models do."""

    def open(self, info: Ready) -> None:
        """An engine serves."""

    def take_outputs(self, outputs: list[RequestOutput], stats: EngineStats | None) -> None:
        """Take outputs."""

    def lose(self, sequence_ids: list[int] | None = None) -> None:
        """The engine that had these sequences, or all, is gone."""

    def cancel(self, request_id: str) -> None:
        """Cancel the requests of this id."""


class MixClient(Protocol):
    """A client whose engine comes, speaks and goes when a mix wants it to."""

    def connect(self, send: Wire) -> None:
        """Connect to an engine, which says next that it is ready."""

    def receive(self, message: EngineMessage) -> None:
        """Take a message of the engine."""

    @property
    def num_outstanding(self) -> int:
        """Number of sequences that the engine has not answered."""

    def lose_engine(self) -> None:
        """Find that the connection is at its end."""


class _Child:
    """Stands in for `EngineChild`: an engine that runs, or has been killed."""

    pid = 0

    def __init__(self, send: Wire, ready: Ready) -> None:
        self.send = send
        self._ready = ready

    def wait_until_ready(self, _timeout_s: float, _is_cancelled: Callable[[], bool]) -> Ready:
        return self._ready

    def receive(self, _timeout_s: float) -> list[OwnersMessage]:
        raise ConnectionResetError("the engine process was killed")

    def kill(self) -> None:
        """It is gone."""

    def reap(self) -> str:
        return "signal 9, SIGKILL"

    def disconnect(self) -> None:
        """There is no socket."""


class OwningMixClient(EngineClient):
    """Owns the engine, without a process and without the thread that reads."""

    def __init__(self, door: Served) -> None:
        timings = ClientTimings(first_backoff_s=0.0)
        config, path = EngineConfig(model_dir="."), Path("llm.engine")
        super().__init__(config, path, door.take_outputs, door.lose, timings=timings)
        self.on_stop = door.cancel
        self._door = door

    def connect(self, send: Wire) -> None:
        self._wire = send

    def receive(self, message: EngineMessage) -> None:
        if not isinstance(message, Ready):
            assert isinstance(message, OwnersMessage)
            self._deliver(message)
            return
        child: Any = _Child(self._wire, message)
        with patch.object(engine_client, "EngineChild", lambda *_: child):
            if self._info is None:
                self._launch()
                self._door.open(message)
            else:
                self._restart()

    @property
    def num_outstanding(self) -> int:
        return len(self._outstanding)

    def lose_engine(self) -> None:
        # The end of the connection is the next thing that this reads.
        self._serve_child()


class _Engine(attached_client._Engine):
    """An engine without a socket."""

    def __init__(self, send: Wire) -> None:
        self.path = Path("llm.engine")
        self.info = None
        self.outstanding: set[int] = set()
        self.arrived: list[EngineMessage] = []
        self._wire = send

    def send_or_hang_up(self, frame: bytes) -> None:
        self._wire(frame)

    def receive(self) -> list[EngineMessage]:
        messages, self.arrived = self.arrived, []
        if not messages:
            raise ConnectionResetError("the engine process was killed")
        return messages

    def close(self) -> None:
        """There is no socket."""


class AttachedMixClient(AttachedClient):
    """Finds the engine of another model, without a thread."""

    def __init__(self, door: Served) -> None:
        super().__init__(Path("."), "llm", door.take_outputs, door.lose, door.cancel)
        self._selector.close()
        self._selector: Any = SimpleNamespace(register=lambda *_: None, unregister=lambda _: None)
        self._door = door

    def connect(self, send: Wire) -> None:
        self._add(_Engine(send))

    def receive(self, message: EngineMessage) -> None:
        (engine,) = self._engines.values()
        assert isinstance(engine, _Engine)
        engine.arrived.append(message)
        self._read(engine)
        if isinstance(message, Ready):
            self._door.open(message)

    @property
    def num_outstanding(self) -> int:
        return sum(len(each.outstanding) for each in self._engines.values())

    def lose_engine(self) -> None:
        (engine,) = self._engines.values()
        self._read(engine)
