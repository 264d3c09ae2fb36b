"""Very many connections that wait for their clients, and more than there are descriptors for."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from naiad.openai_server.connections import ConnectionWatch

_MANY = 10_000
# What a connection costs in the process that serves it.
_MAX_BYTES_EACH = 64 * 1024
_PATIENCE_S = 60
_SERVER = """
import asyncio, os, resource, signal
from naiad.openai_server import connections
from naiad.openai_server.app import ServerOptions
from naiad.openai_server.serving import serve
limit = int(os.environ["LIMIT"])
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
connections.MIN_IDLE_S = float(os.environ["MIN_IDLE"])
options = ServerOptions(server_pid=os.getpid())
asyncio.run(serve(options, None, "127.0.0.1", 0, listens=lambda port: print(port, flush=True)))
"""


@contextlib.contextmanager
def served(num_descriptors: int, min_idle_s: float = 3600) -> Iterator[tuple[int, int]]:
    """A server without a model, in a process that may have so many descriptors; its process id and port.

    Connections that have waited for `min_idle_s` may be closed.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVER],
        stdout=subprocess.PIPE,
        env=os.environ | {"LIMIT": str(num_descriptors), "MIN_IDLE": str(min_idle_s)},
    )
    try:
        assert process.stdout is not None
        yield process.pid, int(process.stdout.readline())
        process.send_signal(signal.SIGTERM)
        assert process.wait(_PATIENCE_S) == 0
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=_PATIENCE_S)


def ask(connection: socket.socket) -> int:
    """Ask for `/version`; return the answer's status."""
    connection.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
    return read(connection)


def read(connection: socket.socket) -> int:
    """Read an answer with a body of stated length; return its status."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += received(connection)
    head, _, body = data.partition(b"\r\n\r\n")
    length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    while len(body) < int(length.split(b":")[1]):
        body += received(connection)
    return int(head.split()[1])


def received(connection: socket.socket) -> bytes:
    data = connection.recv(65536)
    assert data, "the connection has ended"
    return data


def resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


@pytest.mark.skipif(
    resource.getrlimit(resource.RLIMIT_NOFILE)[1] < _MANY + 500,
    reason=f"{_MANY} connections need as many descriptors, and the hard limit is lower",
)
def test_ten_thousand_idle_connections_leave_room_for_another() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        pid, port = stack.enter_context(served(hard))
        idle = [stack.enter_context(connect(port)) for _ in range(100)]
        assert [ask(each) for each in idle] == [200] * len(idle)
        before = resident_bytes(pid)
        for _ in range(_MANY - len(idle)):
            idle.append(stack.enter_context(connect(port)))
            assert ask(idle[-1]) == 200
        assert resident_bytes(pid) - before < _MANY * _MAX_BYTES_EACH
        assert ask(stack.enter_context(connect(port))) == 200
        # The first and the last have not been given up.
        assert ask(idle[0]) == ask(idle[-1]) == 200


def test_beyond_the_descriptors_new_connections_are_refused_and_old_ones_served() -> None:
    with contextlib.ExitStack() as stack:
        # Half of so few are kept for the server's own work.
        pid, port = stack.enter_context(served(200))
        old = [stack.enter_context(connect(port)) for _ in range(100)]
        assert [ask(each) for each in old] == [200] * len(old)
        for _ in range(3):
            with connect(port) as refused:
                assert read(refused) == 503
                assert refused.recv(1) == b""
        assert [ask(each) for each in old] == [200] * len(old)
        assert len(os.listdir(f"/proc/{pid}/fd")) < 200
        old.pop().close()
        assert _asked_until_served(port) == 200


def test_the_connection_that_has_waited_longest_makes_room() -> None:
    with contextlib.ExitStack() as stack:
        _, port = stack.enter_context(served(200, min_idle_s=0))
        old = [stack.enter_context(connect(port)) for _ in range(100)]
        # The first has asked most recently, and the second waits in the middle of its request's headers.
        assert [ask(each) for each in old[1:]] == [200] * 99
        assert ask(old[0]) == 200
        old[1].sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n")
        # Another's answer shows that the server has read this.
        assert ask(old[99]) == 200
        new = [stack.enter_context(connect(port)) for _ in range(50)]
        assert [ask(each) for each in new] == [200] * 50
        assert [each.recv(1) for each in old[2:52]] == [b""] * 50
        old[1].sendall(b"\r\n")
        assert read(old[1]) == 200
        assert [ask(each) for each in (old[0], *old[52:], *new)] == [200] * 99


def test_a_connection_that_was_lost_before_its_answer_does_not_wait_for_its_client() -> None:
    async def test() -> None:
        watch = ConnectionWatch(timeout_s=60, max_connections=1)
        connection = watch.around(asyncio.Protocol)()
        transport = mock.create_autospec(asyncio.Transport, instance=True)
        transport.is_closing.return_value = False
        connection.connection_made(transport)
        connection.begin()  # type: ignore[attr-defined]
        transport.is_closing.return_value = True
        connection.connection_lost(None)
        connection.end()  # type: ignore[attr-defined]
        assert (watch._num_open, watch._idle) == (0, {})

    asyncio.run(test())


def test_a_connection_waits_for_its_client_only_when_all_its_requests_are_answered() -> None:
    async def test() -> None:
        watch = ConnectionWatch(timeout_s=60, max_connections=2)
        connections: list[Any] = [watch.around(asyncio.Protocol)() for _ in range(2)]
        for each in connections:
            transport = mock.create_autospec(asyncio.Transport, instance=True)
            transport.is_closing.return_value = False
            each.connection_made(transport)
        first, second = connections
        first.begin()
        first.end()
        # Its second request came in one piece with the first.
        first.begin()
        assert list(watch._idle) == []
        second.begin()
        second.end()
        first.end()
        # The one that has waited longest comes first.
        assert list(watch._idle) == [second, first]
        second.end()
        assert list(watch._idle) == [first, second]

    asyncio.run(test())


def _asked_until_served(port: int) -> int:
    """The server may not know yet that a connection has ended."""
    end_s = time.monotonic() + _PATIENCE_S
    while True:
        with connect(port) as connection:
            status = _ask_or_refused(connection)
        if status == 200 or time.monotonic() > end_s:
            return status
        time.sleep(0.01)


def _ask_or_refused(connection: socket.socket) -> int:
    try:
        return ask(connection)
    except OSError:
        # The refusal came before the question, to which a closed connection answers with a reset.
        return 503
