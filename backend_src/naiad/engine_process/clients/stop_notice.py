"""Tells a server's engines, without going through the server, that it is about to stop."""

from __future__ import annotations

import select
import time
from collections.abc import Sequence
from pathlib import Path

from naiad.engine_process.clients.engine_connection import EngineConnection
from naiad.engine_process.instance import engine_sockets
from naiad.engine_process.protocol import AskSnapshot, Busy, Ready, SnapshotTaken, StopServing, encode_frame

_SEND_TIMEOUT_S = 1.0
# An engine says at once whether it has work, unless it is of an older release. Such a one says nothing while
# it is loaded or computes a step.
_READY_S = 3.0


class _NotifiedEngine:
    """An engine that refuses new requests, so that once it has no sequences it will have none."""

    def __init__(self, path: Path, timeout_s: float) -> None:
        """Notify it; raises OSError if no process listens there or reads the notice."""
        self._connection = EngineConnection(path, _SEND_TIMEOUT_S)
        try:
            self._connection.send(encode_frame(StopServing(timeout_s)))
        except OSError:
            self._connection.close()
            raise
        self._notified_s = time.monotonic()
        self._info: Ready | None = None
        self._is_busy: bool | None = None
        self._is_asked = False
        self._is_done = False

    def read(self) -> None:
        """Take what it has said; raises OSError if it is gone."""
        while select.select([self._connection], [], [], 0)[0]:
            for message in self._connection.receive():
                match message:
                    case Ready():
                        self._info = message
                    case Busy(is_busy):
                        self._is_busy = is_busy
                    case SnapshotTaken(snapshot):
                        self._is_asked = False
                        self._is_done = not snapshot.stats.num_running + snapshot.stats.num_waiting
                    case _:
                        continue

    def is_done(self) -> bool:
        """Whether it has said that it has no sequences, has none yet, or is too old to tell; else ask it.

        Raises:
            OSError: it is gone.
        """
        if self._info is None:
            # It is being loaded, or computes a step.
            if self._is_busy is None:
                return time.monotonic() - self._notified_s > _READY_S
            return not self._is_busy
        if self._is_done or not self._info.tells_snapshots:
            return True
        if not self._is_asked:
            self._connection.send(encode_frame(AskSnapshot()))
            self._is_asked = True
        return False

    def close(self) -> None:
        """Hang up."""
        self._connection.close()


class StopNotice:
    """Tells each engine once to refuse new requests and to end those that do not finish in time."""

    def __init__(self, directories: Sequence[Path], timeout_s: float) -> None:
        """Set up; nothing is sent yet.

        Args:
            directories: runtime directories of the server.
            timeout_s: time that running requests get to finish, from now on.
        """
        self._directories = directories
        self._deadline_s = time.monotonic() + timeout_s
        self._notified: dict[Path, _NotifiedEngine] = {}

    def send(self) -> None:
        """Notify the engines that have not been notified yet, such as one that was restarted.

        Raises:
            OSError: the directories can not be read now.
        """
        for path, engine in list(self._notified.items()):
            try:
                engine.read()
            except OSError:
                self._lose(path)
        for directory in self._directories:
            for path in engine_sockets(directory):
                if path not in self._notified:
                    self._notify(path)

    def is_done(self) -> bool:
        """Whether no engine has a sequence left.

        This asks engines, whose answers the next `send` takes. An engine that is being loaded has none.
        """
        return all(self._is_done(path, engine) for path, engine in list(self._notified.items()))

    def close(self) -> None:
        """Close the connections; the notices remain in force."""
        for path in list(self._notified):
            self._lose(path)

    def _is_done(self, path: Path, engine: _NotifiedEngine) -> bool:
        try:
            return engine.is_done()
        except OSError:
            self._lose(path)
            return True

    def _lose(self, path: Path) -> None:
        self._notified.pop(path).close()

    def _notify(self, path: Path) -> None:
        try:
            rest_s = max(0.0, self._deadline_s - time.monotonic())
            self._notified[path] = _NotifiedEngine(path, rest_s)
        except OSError:
            # No process listens there yet, or any more.
            return
