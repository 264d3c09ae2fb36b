"""Unix sockets that only this user's processes can connect to."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from naiad.errors import StartupError

# sun_path has 108 bytes, the last of which is zero.
_MAX_PATH_BYTES = 107
_BACKLOG = 16


def check_socket_path(path: Path) -> None:
    """Raise a StartupError if the path is too long for a Unix socket."""
    if len(os.fsencode(path)) > _MAX_PATH_BYTES:
        raise StartupError(f"{path} is too long for a Unix socket; set TMPDIR to a shorter directory")


def listen(path: Path, kind: socket.SocketKind = socket.SOCK_STREAM) -> socket.socket:
    """Create a non-blocking listening socket of mode 0600.

    Raises:
        OSError: it cannot be created there.
    """
    listener = socket.socket(socket.AF_UNIX, kind)
    mask = os.umask(0o177)
    try:
        listener.bind(str(path))
    finally:
        os.umask(mask)
    listener.setblocking(False)
    listener.listen(_BACKLOG)
    return listener


def connect(path: Path, timeout_s: float, kind: socket.SocketKind = socket.SOCK_STREAM) -> socket.socket:
    """Connect to the process that listens at `path`.

    Args:
        path: path of the socket.
        timeout_s: timeout of this call and of later calls on the connection; 0: they do not block.
        kind: kind of the socket.

    Raises:
        OSError: no process listens there.
    """
    connection = socket.socket(socket.AF_UNIX, kind)
    try:
        connection.settimeout(timeout_s)
        connection.connect(str(path))
    except OSError:
        connection.close()
        raise
    return connection
