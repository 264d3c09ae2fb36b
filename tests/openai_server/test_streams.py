"""Clients that do not read, and clients that read slowly."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from naiad.openai_server import streams
from naiad.openai_server.streams import StreamWatch

# More than the buffers of a connection on this machine hold.
RAW = b"1" * (64 << 20)
SLOW_S = 2.0


@contextlib.asynccontextmanager
async def connected(
    watch: StreamWatch, ended: asyncio.Event, raw: bytes = RAW, receive_bytes: int | None = None
) -> AsyncIterator[socket.socket]:
    """A connection on which an answer comes; `ended` is set when the server is done with it."""

    async def handler(request: web.Request) -> web.StreamResponse:
        try:
            return await watch.answer(request, raw)
        finally:
            ended.set()

    app = web.Application()
    app.router.add_get("/", handler)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    task = asyncio.create_task(watch.run())
    client = socket.socket()
    if receive_bytes is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    client.connect(runner.addresses[0][:2])
    client.setblocking(False)
    await asyncio.get_running_loop().sock_sendall(client, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    try:
        yield client
    finally:
        client.close()
        task.cancel()
        await runner.cleanup()


@pytest.fixture(autouse=True)
def short_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_WATCH_S", 0.01)


def test_a_client_that_does_not_read_its_answer_is_ended() -> None:
    async def wait() -> None:
        ended = asyncio.Event()
        async with connected(StreamWatch(60, 0.2), ended):
            await asyncio.wait_for(ended.wait(), 60)

    asyncio.run(wait())


def test_a_client_is_noticed_before_the_system_has_taken_its_whole_answer() -> None:
    """The answer fits into the system's own buffers for a connection."""
    raw = b"1" * (1 << 20)

    async def read() -> int:
        loop, ended, num_bytes = asyncio.get_running_loop(), asyncio.Event(), 0
        async with connected(StreamWatch(60, 0.2), ended, raw, receive_bytes=4096) as client:
            await asyncio.wait_for(ended.wait(), 60)
            with contextlib.suppress(ConnectionResetError):
                while num_bytes < len(raw) and (part := await loop.sock_recv(client, 65_536)):
                    num_bytes += len(part)
        return num_bytes

    assert asyncio.run(read()) < len(raw)


def test_a_client_that_reads_slowly_gets_its_answer() -> None:
    async def read() -> int:
        loop, num_bytes = asyncio.get_running_loop(), 0
        async with connected(StreamWatch(60, SLOW_S), asyncio.Event()) as client:
            while num_bytes < len(RAW):
                part = await loop.sock_recv(client, len(RAW) // 64)
                assert part, "the server has hung up"
                num_bytes += len(part)
                # All of it takes longer than a client may take nothing.
                await asyncio.sleep(SLOW_S / 50)
        return num_bytes

    assert asyncio.run(read()) >= len(RAW)
