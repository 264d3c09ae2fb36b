"""Who listens on a port: what answers there may be another program."""

from __future__ import annotations

import contextlib
import socket

import psutil


def listens(pid: int, port: int) -> bool:
    """Whether this process, or one below it, listens on the TCP port; true if the system does not tell."""
    try:
        root = psutil.Process(pid)
        is_seen = any(port in _ports_of(process) for process in (root, *root.children(recursive=True)))
        return is_seen or not _is_told()
    except psutil.NoSuchProcess:
        return False
    except (psutil.AccessDenied, OSError):
        return True


def _is_told() -> bool:
    """Whether the system tells who listens; a sandbox may not."""
    with socket.create_server(("127.0.0.1", 0)) as own:
        return own.getsockname()[1] in _ports_of(psutil.Process())


def _ports_of(process: psutil.Process) -> set[int]:
    with contextlib.suppress(psutil.NoSuchProcess):
        connections = process.net_connections("tcp")
        return {each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN}
    return set()
