"""The gate's HTTP door in front of a server that answers as a test says."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from naiad.gate.http_door import HTTPDoor
from naiad.gate.limits import Limits
from naiad.gate.routes import INFERENCE, RouteTable
from naiad.hosts import AllowedHosts

GENERATE = "/v2/models/m/generate"
STREAM = "/v2/models/m/generate_stream"
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"
# Nothing that a test waits for takes so long.
PATIENCE_S = 30.0


@dataclass
class FakeServer:
    """Takes requests and sends what the test puts into `to_send`; None closes the connection.

    Attributes:
        requests: heads and bodies that have come.
        to_send: what is sent next.
        answer: what is sent for each request; empty: nothing.
        lost: set when a connection has ended.
    """

    requests: list[bytes] = field(default_factory=list)
    to_send: asyncio.Queue[bytes | None] = field(default_factory=asyncio.Queue)
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    num_connections: int = 0
    answer: bytes = b""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        receiver = asyncio.create_task(self._receive(reader, writer))
        while not receiver.done():
            sender = asyncio.create_task(self.to_send.get())
            await asyncio.wait({sender, receiver}, return_when=asyncio.FIRST_COMPLETED)
            if not sender.done():
                sender.cancel()
                break
            data = sender.result()
            if data is None:
                break
            writer.write(data)
        writer.close()
        receiver.cancel()
        self.lost.set()

    async def _receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionResetError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                lengths = [
                    int(line.split(b":")[1])
                    for line in head.split(b"\r\n")
                    if line.startswith(b"Content-Length")
                ]
                self.requests.append(head + await reader.readexactly(sum(lengths)))
                writer.write(self.answer)


@dataclass
class Setting:
    """A door, its port, and the server behind it."""

    door: HTTPDoor
    port: int
    server: FakeServer

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 20)

    async def exchange(self, raw: bytes) -> bytes:
        """Send something, and return everything that comes until the connection is closed."""
        reader, writer = await self.connect()
        writer.write(raw)
        answer = await asyncio.wait_for(reader.read(), PATIENCE_S)
        writer.close()
        return answer


@contextlib.asynccontextmanager
async def a_door(limits: Limits | None = None, *, server_is_there: bool = True) -> AsyncIterator[Setting]:
    fake = FakeServer()
    listener = await asyncio.start_server(fake.serve, "127.0.0.1", 0)
    server_port = listener.sockets[0].getsockname()[1]
    if not server_is_there:
        listener.close()
    door = HTTPDoor(
        RouteTable(INFERENCE),
        ("127.0.0.1", server_port),
        limits or Limits(),
        AllowedHosts(["known.example"]),
        ["https://known.example"],
    )
    port = await door.listen("127.0.0.1", 0)
    watch = asyncio.create_task(door.watch())
    try:
        yield Setting(door, port, fake)
    finally:
        watch.cancel()
        await door.close(0.0)
        listener.close()


def post(path: str, body: bytes, *headers: str) -> bytes:
    """A request with a body of known length."""
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def get(path: str, *headers: str) -> bytes:
    """A request without a body."""
    return "\r\n".join([f"GET {path} HTTP/1.1", "Host: localhost", *headers]).encode("latin-1") + b"\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])
