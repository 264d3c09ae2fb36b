"""Connections whose headers do not come, on real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable

from naiad.openai_server.app import ServerOptions
from naiad.openai_server.serving import serve

HOST = "127.0.0.1"
TIMEOUT_S = 2.0
LONGER_S = 1.5 * TIMEOUT_S
PATIENCE_S = 60

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@contextlib.asynccontextmanager
async def served() -> AsyncIterator[int]:
    """The whole server without a model; its port."""
    port = asyncio.get_running_loop().create_future()
    options = ServerOptions(server_pid=os.getpid(), header_timeout_s=TIMEOUT_S)
    task = asyncio.create_task(
        serve(options, None, HOST, 0, stop_signals=(signal.SIGUSR2,), listens=port.set_result)
    )
    yield await port
    signal.raise_signal(signal.SIGUSR2)
    await task


def run(*tests: Callable[[Streams], Awaitable[None]]) -> None:
    """Run each with a connection of its own, all at the same time."""

    async def one(test: Callable[[Streams], Awaitable[None]], port: int) -> None:
        reader, writer = await asyncio.open_connection(HOST, port)
        await test((reader, writer))
        writer.close()

    async def all_of_them() -> None:
        async with served() as port:
            await asyncio.wait_for(asyncio.gather(*(one(each, port) for each in tests)), PATIENCE_S)

    asyncio.run(all_of_them())


async def answer(reader: asyncio.StreamReader) -> int:
    """Read an answer; return its status."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    await reader.readexactly(int(length.split(b":")[1]))
    return int(head.split()[1])


async def is_closed(reader: asyncio.StreamReader) -> bool:
    try:
        return await reader.read() == b""
    except ConnectionResetError:
        return True


async def drip(streams: Streams, begin: bytes) -> None:
    """Send headers that never end until the connection is closed."""
    reader, writer = streams
    writer.write(begin)
    closed = asyncio.create_task(is_closed(reader))
    while not closed.done():
        writer.write(b"X-More: 1\r\n")
        await asyncio.sleep(0.05)
    assert closed.result()


def test_a_connection_without_a_request_is_closed() -> None:
    async def silent(streams: Streams) -> None:
        assert await is_closed(streams[0])

    async def dripping(streams: Streams) -> None:
        await drip(streams, b"GET /version HTTP/1.1\r\n")

    async def dripping_later(streams: Streams) -> None:
        streams[1].write(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert await answer(streams[0]) == 200
        await drip(streams, b"GET /version HTTP/1.1\r\nHost: localhost\r\n")

    run(silent, dripping, dripping_later)


def test_bodies_and_pauses_between_requests_may_take_longer() -> None:
    async def idle(streams: Streams) -> None:
        for _ in range(2):
            streams[1].write(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert await answer(streams[0]) == 200
            await asyncio.sleep(LONGER_S)

    async def slow_body(streams: Streams) -> None:
        head = b"POST /detokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        streams[1].write(head + b"Content-Length: 4\r\n\r\n[")
        await asyncio.sleep(LONGER_S)
        streams[1].write(b"1,2")
        assert await answer(streams[0]) == 400

    run(idle, slow_body)
