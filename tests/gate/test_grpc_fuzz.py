"""Mutated frames of clients: a call or its connection ends, and what reaches the server is well-formed."""

from __future__ import annotations

import asyncio
import contextlib
import random

import pytest
from hpack import Decoder, Encoder
from tritonclient.grpc import service_pb2

from helpers.http2_wire import (
    ANSWER_HEAD,
    INFER,
    LIVE,
    OK,
    STREAM,
    FrameSetting,
    Wire,
    a_frame_door,
    call,
    data,
    head_fields,
    headers,
)
from helpers.mutations import mutated
from naiad.gate import grpc_connection, grpc_door
from naiad.gate import http2_frames as http2
from naiad.gate.grpc_framing import MessageReader, framed
from naiad.gate.grpc_messages import check_infer_request
from naiad.gate.limits import Limits

NUM_CASES = 1000
OPEN_S = 1.0
LIMITS = Limits(max_body_bytes=5000, head_s=0.1, body_s=0.1, slow_reader_s=0.1)
GOOD = service_pb2.ModelInferRequest(model_name="m", raw_input_contents=[bytes(600)]).SerializeToString()
BAD = service_pb2.ModelInferRequest(parameters={"triton_x": {"int64_param": 1}}).SerializeToString()
TRACE = (b"traceparent", b"00-" + b"1" * 32 + b"-" + b"2" * 16 + b"-01")
BLOCK = Encoder().encode(head_fields(STREAM, TRACE))
SEEDS = [
    call(1, STREAM, GOOD, BAD, GOOD) + call(3, INFER, GOOD) + call(5, "/x", b""),
    http2.frame(http2.HEADERS, 0, 1, BLOCK[:20])
    + http2.frame(http2.CONTINUATION, http2.END_HEADERS, 1, BLOCK[20:])
    + data(1, framed(GOOD)[:100])
    + http2.window_update(1, 100)
    + data(1, framed(GOOD)[100:], ends=True),
    http2.settings({http2.INITIAL_WINDOW_SIZE: 20})
    + call(1, STREAM, BAD, BAD, ends=False)
    + http2.window_update(1, 500)
    + http2.window_update(0, 500)
    + http2.rst_stream(1, http2.CANCEL)
    + http2.frame(http2.PING, 0, 0, bytes(8))
    + call(3, LIVE, b""),
]
KNOWN = [*SEEDS, framed(GOOD), BLOCK, http2.goaway(0, 0), http2.frame(http2.PRIORITY, 0, 1, bytes(5))]


class CheckingServer:
    """Answers every request; keeps what it got."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.paths: set[str] = set()
        self.tasks: list[asyncio.Task[None]] = []

    async def serve(self, setting: FrameSetting) -> None:
        while True:
            wire = await setting.accepted.get()
            self.tasks.append(asyncio.create_task(self._serve(wire)))

    async def _serve(self, wire: Wire) -> None:
        readers: dict[int, tuple[str, MessageReader]] = {}
        try:
            await wire.greet()
            while True:
                each = await wire.any_frame()
                assert each.kind != http2.CONTINUATION
                if each.kind == http2.HEADERS:
                    path = self._path(wire.decoder, each.payload)
                    readers[each.stream_id] = (path, MessageReader("identity", LIMITS.max_body_bytes))
                    wire.send(headers(each.stream_id, ANSWER_HEAD))
                elif each.kind == http2.DATA:
                    self._check(wire, each, *readers[each.stream_id])
        except (asyncio.IncompleteReadError, ConnectionError):
            pass

    def _path(self, decoder: Decoder, encoded: bytes) -> str:
        fields = [(str(name), str(value)) for name, value in decoder.decode(encoded)]
        assert {name for name, _ in fields} <= {
            *(":method", ":scheme", ":path", ":authority", "te", "content-type", "user-agent"),
            *("grpc-timeout", "traceparent", "tracestate"),
        }
        self.num_calls += 1
        return dict(fields)[":path"]

    def _check(self, wire: Wire, each: http2.Frame, path: str, reader: MessageReader) -> None:
        self.paths.add(path)
        reader.add(each.payload, 0.0)
        while (message := reader.next()) is not None:
            if path in (STREAM, INFER):
                check_infer_request(message.content, LIMITS)
            wire.send(data(each.stream_id, framed(message.content)[:100]))
        if each.flags & http2.END_STREAM:
            reader.check_end()
            wire.send(headers(each.stream_id, OK, ends=True))


async def send(setting: FrameSetting, raw: bytes) -> None:
    client = await setting.connect()
    client.send(raw)
    # A stream that nothing is asked of may stay open.
    with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
        await asyncio.wait_for(client.end(), OPEN_S)
    client.writer.close()


def test_mutated_frames_harm_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_door, "_LOOK_S", 0.02)
    monkeypatch.setattr(grpc_connection, "_IDLE_S", 0.1)
    server = CheckingServer()

    async def inside() -> None:
        async with a_frame_door(LIMITS) as setting:
            serving = asyncio.create_task(server.serve(setting))
            draw = random.Random(20)
            for _ in range(NUM_CASES // 50):
                raws = [mutated(draw.choice(SEEDS), draw, KNOWN) for _ in range(50)]
                await asyncio.gather(*(send(setting, raw) for raw in raws))
            while setting.door._connections:
                await asyncio.sleep(0.01)
            assert setting.door.num_refused > NUM_CASES / 4
            serving.cancel()
            await asyncio.gather(*server.tasks)

    asyncio.run(inside())
    assert server.num_calls > NUM_CASES / 8
    assert server.paths == {STREAM, INFER, LIVE}
