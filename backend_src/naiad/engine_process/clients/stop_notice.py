"""Tells a server's engines, without going through the server, that it is about to stop."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from pathlib import Path

from naiad.engine_process.instance import engine_sockets
from naiad.engine_process.protocol import StopServing, encode_frame
from naiad.engine_process.unix_socket import connect

_SEND_TIMEOUT_S = 1.0
_READ_BYTES = 1 << 16


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
        self._notified: dict[Path, socket.socket] = {}

    def send(self) -> None:
        """Notify the engines that have not been notified yet, such as one that was restarted."""
        for path, connection in list(self._notified.items()):
            if not _is_open(connection):
                connection.close()
                del self._notified[path]
        for directory in self._directories:
            for path in engine_sockets(directory):
                if path not in self._notified:
                    self._notify(path)

    def close(self) -> None:
        """Close the connections; the notices remain in force."""
        for connection in self._notified.values():
            connection.close()
        self._notified.clear()

    def _notify(self, path: Path) -> None:
        rest_s = max(0.0, self._deadline_s - time.monotonic())
        try:
            connection = connect(path, _SEND_TIMEOUT_S)
        except OSError:
            # No process listens there yet, or any more.
            return
        try:
            connection.sendall(encode_frame(StopServing(rest_s)), socket.MSG_NOSIGNAL)
        except OSError:
            connection.close()
            return
        connection.setblocking(False)
        self._notified[path] = connection


def _is_open(connection: socket.socket) -> bool:
    """Whether the engine still holds the connection; its messages are discarded."""
    try:
        while connection.recv(_READ_BYTES):
            pass
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
