"""Clients of the HTTP door that have not read the last of an answer when it is complete."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import pytest

from helpers.gate_doors import GENERATE, PATIENCE_S, Setting, a_door, get, post
from naiad.gate import http_connection
from naiad.gate.http_connection import ClientConnection
from naiad.gate.http_door import HTTPDoor
from naiad.gate.limits import Limits

LIMITS = Limits()
READING_BYTES = 16 << 10
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d"
BODY = b'{"text_output": "%s"}' % (b"a" * 400_000)
SHORT = HEAD % 2 + b"\r\n\r\n{}"
# Less than what a client may wait until it reads more.
SOME_S = LIMITS.slow_reader_s / 2


@dataclass
class SlowClient:
    """A client that has asked for `BODY`, which waits at the gate."""

    socket: socket.socket
    door: HTTPDoor
    connection: ClientConnection
    received: bytes = b""

    @property
    def num_unsent(self) -> int:
        return int(self.connection._transport.get_write_buffer_size())

    def look(self, later_s: float) -> None:
        """Have the gate look as if so much time had gone by since its last look."""
        for connection in [*self.door._connections]:
            connection.look(asyncio.get_running_loop().time() + later_s)

    async def read(self) -> bool:
        """Read a little; False at the end of the connection."""
        data = await asyncio.get_running_loop().sock_recv(self.socket, 4096)
        self.received += data
        return bool(data)

    async def read_on(self) -> None:
        """Read so much that it counts as reading."""
        before = self.num_unsent
        while self.num_unsent > before - READING_BYTES:
            assert await self.read()


def run(work: Callable[[Setting, SlowClient], Awaitable[None]], *headers: str) -> None:
    async def inside() -> None:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32 << 10)
            client.setblocking(False)
            async with a_door(LIMITS) as setting:
                await asyncio.wait_for(serve(setting, client), PATIENCE_S)

    async def serve(setting: Setting, client: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, ("127.0.0.1", setting.port))
        await loop.sock_sendall(client, post(GENERATE, b'{"text_input": "a"}', *headers))
        setting.server.to_send.put_nowait(HEAD % len(BODY) + b"\r\n\r\n" + BODY)
        while not setting.door._connections:
            await asyncio.sleep(0)
        (connection,) = setting.door._connections
        while connection._state not in ("idle", "closed"):
            await asyncio.sleep(0)
        slow = SlowClient(client, setting.door, connection)
        assert slow.num_unsent > 8 * READING_BYTES
        await work(setting, slow)

    asyncio.run(inside())


@pytest.fixture(autouse=True)
def all_waits_at_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate takes the whole answer from the server, and the kernel takes little of it from the gate."""
    monkeypatch.setattr(http_connection, "_WRITE_BUFFER_BYTES", 1 << 20)
    monkeypatch.setattr(http_connection, "_SEND_BUFFER_BYTES", 16 << 10)


def test_who_reads_slowly_gets_all_of_an_answer_behind_which_the_connection_is_closed() -> None:
    async def work(setting: Setting, client: SlowClient) -> None:
        for _ in range(3):
            client.look(SOME_S)
            await client.read_on()
            client.look(3 * SOME_S)
        while await client.read():
            client.look(SOME_S)
        assert client.received == HEAD % len(BODY) + b"\r\nConnection: close\r\n\r\n" + BODY
        assert setting.door.num_slow_readers == 0

    run(work, "Connection: close")


def test_a_connection_is_without_requests_when_its_last_answer_has_been_read() -> None:
    async def work(setting: Setting, client: SlowClient) -> None:
        for _ in range(3):
            await client.read_on()
            client.look(LIMITS.idle_s + 1)
        expected = HEAD % len(BODY) + b"\r\n\r\n" + BODY
        while len(client.received) < len(expected):
            await client.read()
        client.look(LIMITS.idle_s + 1)
        client.look(LIMITS.idle_s / 2)
        await asyncio.get_running_loop().sock_sendall(client.socket, get("/v2"))
        setting.server.to_send.put_nowait(SHORT)
        while len(client.received) < len(expected + SHORT):
            assert await client.read()
        assert client.received == expected + SHORT
        client.look(LIMITS.idle_s + 1)
        assert not await client.read()

    run(work)


@pytest.mark.parametrize("headers", [("Connection: close",), ()], ids=["closed", "kept"])
def test_who_takes_too_little_of_what_is_left_is_gone(headers: tuple[str, ...]) -> None:
    async def work(setting: Setting, client: SlowClient) -> None:
        await client.read()
        client.look(LIMITS.slow_reader_s + 1)
        assert setting.door.num_slow_readers == 1
        while await client.read():
            continue
        assert len(client.received) < len(BODY)

    run(work, *headers)


def test_a_refusal_does_not_cut_off_the_answer_before_it() -> None:
    async def work(setting: Setting, client: SlowClient) -> None:
        await asyncio.get_running_loop().sock_sendall(client.socket, get("/v2/shm"))
        while setting.door.num_refused == 0:
            await asyncio.sleep(0)
        for _ in range(3):
            client.look(SOME_S)
            await client.read_on()
        while await client.read():
            client.look(SOME_S)
        whole = HEAD % len(BODY) + b"\r\n\r\n" + BODY
        assert client.received.startswith(whole + b"HTTP/1.1 404 ")
        assert client.received.endswith(b"}")

    run(work)
