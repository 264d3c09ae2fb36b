"""Both ends of the gate's gRPC door, spoken to in frames of HTTP/2: a raw client and a raw server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpack import Decoder
from tritonclient.grpc import service_pb2

from naiad.gate import http2_frames as http2
from naiad.gate.grpc_door import GRPCDoor
from naiad.gate.grpc_framing import framed
from naiad.gate.grpc_methods import INFERENCE
from naiad.gate.header_blocks import encode
from naiad.gate.http2_frames import HEAD, PREFACE, Frame
from naiad.gate.limits import Limits

PATIENCE_S, TEST_S = 20.0, 60.0
SERVICE = "/inference.GRPCInferenceService/"
STREAM, INFER, LIVE = SERVICE + "ModelStreamInfer", SERVICE + "ModelInfer", SERVICE + "ServerLive"
ANSWER_HEAD = ((b":status", b"200"), (b"content-type", b"application/grpc"))
OK = ((b"grpc-status", b"0"),)
# What a test rarely asks for.
HOUSEKEEPING = (http2.SETTINGS, http2.WINDOW_UPDATE, http2.PING)
PING = http2.frame(http2.PING, 0, 0, b"12345678")
GOOD = service_pb2.ModelInferRequest(model_name="m", id="7").SerializeToString()
# The gate refuses it.
BAD = service_pb2.ModelInferRequest(id="bad", parameters={"triton_x": {"int64_param": 1}}).SerializeToString()


def head_fields(path: str = STREAM, *more: tuple[bytes, bytes]) -> tuple[tuple[bytes, bytes], ...]:
    """The head of a request, as a client sends it."""
    return (
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", path.encode()),
        (b":authority", b"localhost"),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
        *more,
    )


def headers(stream_id: int, fields: Sequence[tuple[bytes, bytes]], *, ends: bool = False) -> bytes:
    return http2.header_frames(stream_id, encode(fields), ends=ends)


def data(stream_id: int, payload: bytes, *, ends: bool = False) -> bytes:
    return http2.frame(http2.DATA, http2.END_STREAM if ends else 0, stream_id, payload)


def call(stream_id: int, path: str, *messages: bytes, ends: bool = True) -> bytes:
    """A whole request, or with `ends=False` the begin of one."""
    body = b"".join(framed(message) for message in messages)
    return headers(stream_id, head_fields(path)) + data(stream_id, body, ends=ends)


@dataclass
class Wire:
    """One end of a connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    decoder: Decoder = field(default_factory=Decoder)

    def send(self, *parts: bytes) -> None:
        self.writer.write(b"".join(parts))

    async def greet(self, settings: dict[int, int] | None = None) -> None:
        """As a server, hear and say hello."""
        assert await self.reader.readexactly(len(PREFACE)) == PREFACE
        self.send(http2.settings(settings or {}))

    async def any_frame(self) -> Frame:
        """The next frame, whatever it is; raises IncompleteReadError at the end of the connection."""
        head = await asyncio.wait_for(self.reader.readexactly(HEAD.size), PATIENCE_S)
        high, low, kind, flags, stream_id = HEAD.unpack(head)
        payload = await asyncio.wait_for(self.reader.readexactly(high << 8 | low), PATIENCE_S)
        return Frame(kind, flags, stream_id, payload)

    async def frame(self, *kinds: int) -> Frame:
        """The next frame of these kinds; by default the next one that is not housekeeping."""
        while True:
            each = await self.any_frame()
            if each.kind in kinds or (not kinds and each.kind not in HOUSEKEEPING):
                return each

    async def fields(self, stream_id: int) -> dict[str, str]:
        """The fields of the next header block, which is of this stream."""
        each = await self.frame()
        assert (each.kind, each.stream_id) == (http2.HEADERS, stream_id), each
        assert each.flags & http2.END_HEADERS
        return self.decoded(each)

    def decoded(self, each: Frame) -> dict[str, str]:
        return {str(name): str(value) for name, value in self.decoder.decode(each.payload)}

    async def status(self, stream_id: int) -> tuple[int, str]:
        """The status that ends a stream, in its next header block."""
        fields = await self.fields(stream_id)
        return int(fields["grpc-status"]), fields.get("grpc-message", "")

    async def end(self) -> list[Frame]:
        """What still comes until the connection ends."""
        rest = []
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                rest.append(await self.any_frame())
        return rest

    async def goaway_code(self) -> int:
        """The code of the GOAWAY behind which the connection ends."""
        frames = [each for each in await self.end() if each.kind == http2.GOAWAY]
        assert len(frames) == 1
        return int.from_bytes(frames[0].payload[4:8], "big")


async def request_of(server: Wire) -> tuple[list[tuple[str, str]], bytes, int]:
    """Head, body and stream of the next request that comes to its end."""
    first = await server.frame()
    assert (first.kind, first.flags) == (http2.HEADERS, http2.END_HEADERS)
    fields = [(str(name), str(value)) for name, value in server.decoder.decode(first.payload)]
    body, each = b"", first
    while not each.flags & http2.END_STREAM:
        each = await server.frame()
        assert (each.kind, each.stream_id) == (http2.DATA, first.stream_id)
        body += each.payload
    return fields, body, first.stream_id


@dataclass
class FrameSetting:
    """A door between raw ends."""

    door: GRPCDoor
    port: int
    accepted: asyncio.Queue[Wire]
    faults: list[dict[str, Any]] = field(default_factory=list)

    async def connect(self, settings: dict[int, int] | None = None) -> Wire:
        """A client that has said hello."""
        wire = Wire(*await asyncio.open_connection("127.0.0.1", self.port))
        wire.send(PREFACE, http2.settings(settings or {}))
        return wire

    async def server(self, settings: dict[int, int] | None = None) -> Wire:
        """The server's end of the next connection to it, which has said hello."""
        wire = await asyncio.wait_for(self.accepted.get(), PATIENCE_S)
        await wire.greet(settings)
        return wire


@contextlib.asynccontextmanager
async def a_frame_door(limits: Limits | None = None) -> AsyncIterator[FrameSetting]:
    """A door in front of a raw server; afterwards nothing of it is left."""
    accepted: asyncio.Queue[Wire] = asyncio.Queue()
    faults: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: faults.append(context))
    wires: list[Wire] = []

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wires.append(Wire(reader, writer))
        accepted.put_nowait(wires[-1])

    listener = await asyncio.start_server(accept, "127.0.0.1", 0)
    door = GRPCDoor(INFERENCE, f"127.0.0.1:{listener.sockets[0].getsockname()[1]}", limits or Limits())
    watch = asyncio.create_task(door.watch())
    port = await door.listen("127.0.0.1", 0)
    try:
        yield FrameSetting(door, port, accepted, faults)
    finally:
        watch.cancel()
        await door.close(0.0)
        for wire in wires:
            wire.writer.close()
        listener.close()
        for _ in range(500):
            if not door._connections and not door._num_calls:
                break
            await asyncio.sleep(0.01)
    assert (len(door._connections), door._num_calls) == (0, 0)
    assert (door._num_held_bytes, door._num_inflated_bytes) == (0, 0)
    assert faults == []


def run(work: Callable[[FrameSetting], Awaitable[None]], limits: Limits | None = None) -> None:
    """Do this work with a door on an event loop of its own."""

    async def inside() -> None:
        async with a_frame_door(limits) as setting:
            await asyncio.wait_for(work(setting), TEST_S)

    asyncio.run(inside())
