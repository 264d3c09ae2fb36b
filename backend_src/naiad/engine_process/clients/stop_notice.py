"""How the one who stops a server tells its engines, past the server."""

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
    """Tells each engine once to refuse what is new and to end what does not finish in time."""

    def __init__(self, directories: Sequence[Path], timeout_s: float) -> None:
        """Tell nobody yet.

        Args:
            directories: runtime directories of the server.
            timeout_s: what running requests get to finish, from now on.
        """
        self._directories = directories
        self._deadline_s = time.monotonic() + timeout_s
        self._told: dict[Path, socket.socket] = {}

    def tell(self) -> None:
        """Tell the engines that have not heard it, as one that was started again has not."""
        for path, connection in list(self._told.items()):
            if not _is_open(connection):
                connection.close()
                del self._told[path]
        for directory in self._directories:
            for path in engine_sockets(directory):
                if path not in self._told:
                    self._tell(path)

    def close(self) -> None:
        """Hang up; what was told stays told."""
        for connection in self._told.values():
            connection.close()
        self._told.clear()

    def _tell(self, path: Path) -> None:
        rest_s = max(0.0, self._deadline_s - time.monotonic())
        try:
            connection = connect(path, _SEND_TIMEOUT_S)
        except OSError:
            # Nobody listens yet, or any more: nothing runs there.
            return
        try:
            connection.sendall(encode_frame(StopServing(rest_s)), socket.MSG_NOSIGNAL)
        except OSError:
            connection.close()
            return
        connection.setblocking(False)
        self._told[path] = connection


def _is_open(connection: socket.socket) -> bool:
    """Whether the engine is there; what it says is for its other doors."""
    try:
        while connection.recv(_READ_BYTES):
            pass
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
