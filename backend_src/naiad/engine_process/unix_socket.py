"""Unix sockets of the processes of one server, for this user alone."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from naiad.errors import StartupError

# sun_path holds 108 bytes, the last a zero.
_MAX_PATH_BYTES = 107
_BACKLOG = 16


def check_socket_path(path: Path) -> None:
    """Raise a StartupError if the path is too long for a Unix socket."""
    if len(os.fsencode(path)) > _MAX_PATH_BYTES:
        raise StartupError(f"{path} is too long for a Unix socket; set TMPDIR to a shorter directory")


def listen(path: Path, kind: socket.SocketKind = socket.SOCK_STREAM) -> socket.socket:
    """A listening socket that does not block, of mode 0600.

    Raises:
        OSError: it can not be created there.
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
    """A connection to the process that listens at `path`.

    Args:
        path: of the socket.
        timeout_s: of this and of each later call on the connection; 0: none of them blocks.
        kind: of the socket.

    Raises:
        OSError: nobody listens there.
    """
    connection = socket.socket(socket.AF_UNIX, kind)
    try:
        connection.settimeout(timeout_s)
        connection.connect(str(path))
    except OSError:
        connection.close()
        raise
    return connection
