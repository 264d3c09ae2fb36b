"""Random calls of grpc's own client through the gate to grpc's own server: what is sent comes back."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import pytest
from tritonclient.grpc import service_pb2

from naiad.gate.grpc_door import GRPCDoor
from naiad.gate.grpc_methods import INFERENCE
from naiad.gate.limits import Limits

SERVICE = "/inference.GRPCInferenceService/"
STREAM, INFER = SERVICE + "ModelStreamInfer", SERVICE + "ModelInfer"
MAX_BYTES = 300_000
PATIENCE_S = 120.0
# As clients have them, with small windows, and with ones that grow by measurement.
CHANNELS: list[list[tuple[str, int]]] = [
    [],
    [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)],
    [("grpc.http2.max_frame_size", 1 << 20), ("grpc.default_compression_algorithm", 2)],
]


@dataclass
class Echo:
    """Sends every message back."""

    num_running: int = 0
    num_calls: int = 0

    def service(self, _details: Any) -> Any:
        async def serve(requests: AsyncIterator[bytes], context: Any) -> None:
            self.num_running += 1
            self.num_calls += 1
            try:
                async for raw in requests:
                    await context.write(raw)
            finally:
                self.num_running -= 1

        return grpc.stream_stream_rpc_method_handler(serve)


def message(draw: random.Random, number: int) -> bytes:
    size = draw.choice((0, 10, 500, 3000, 17_000, 70_000, draw.randrange(MAX_BYTES - 100)))
    request = service_pb2.ModelInferRequest(id=str(number), raw_input_contents=[draw.randbytes(size)])
    return bytes(request.SerializeToString())


def refused(number: int) -> bytes:
    request = service_pb2.ModelInferRequest(id=str(number), parameters={"triton_x": {"int64_param": 1}})
    return bytes(request.SerializeToString())


async def unary(channel: grpc.aio.Channel, draw: random.Random) -> None:
    raw = message(draw, 0)
    assert await channel.unary_unary(INFER)(raw) == raw


async def stream(channel: grpc.aio.Channel, draw: random.Random) -> None:
    """Messages with and without errors; each comes back, or its error does."""
    numbers = range(draw.randrange(1, 12))
    bad = {number for number in numbers if draw.random() < 0.2}
    sent = [refused(number) if number in bad else message(draw, number) for number in numbers]
    gap_s, is_slow = draw.choice((0.0, 0.0, 0.001)), draw.random() < 0.2
    seed = draw.randrange(1 << 30)

    async def requests() -> AsyncIterator[bytes]:
        gaps = random.Random(seed)
        for each in sent:
            yield each
            await asyncio.sleep(gaps.random() * gap_s)

    answers, errors = [], set()
    async for raw in channel.stream_stream(STREAM)(requests()):
        if is_slow:
            await asyncio.sleep(0.005)
        answer = service_pb2.ModelStreamInferResponse.FromString(raw) if len(raw) < 2000 else None
        if answer is not None and "triton_x" in answer.error_message:
            errors.add(int(answer.infer_response.id))
        else:
            answers.append(raw)
    assert errors == bad
    assert answers == [each for number, each in enumerate(sent) if number not in bad]


async def cancelled(channel: grpc.aio.Channel, draw: random.Random) -> None:
    call = channel.stream_stream(STREAM)()
    for number in range(draw.randrange(4)):
        raw = message(draw, number)
        await call.write(raw)
        if draw.random() < 0.5:
            await call.read()
    await asyncio.sleep(draw.random() * 0.01)
    call.cancel()


async def too_large(channel: grpc.aio.Channel, draw: random.Random) -> None:
    path = draw.choice((STREAM, INFER))
    call = channel.stream_stream(path)(iter([bytes(MAX_BYTES + 1)]))
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        [each async for each in call]
    assert failed.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def mixes(seed: int, num_calls: int) -> None:
    echo = Echo()
    sizes = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    server = grpc.aio.server(handlers=[echo], options=sizes)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    door = GRPCDoor(INFERENCE, f"127.0.0.1:{port}", Limits(max_body_bytes=MAX_BYTES))
    watch = asyncio.create_task(door.watch())
    address = f"127.0.0.1:{await door.listen('127.0.0.1', 0)}"
    channels = [grpc.aio.insecure_channel(address, options=[*sizes, *each]) for each in CHANNELS]
    draw = random.Random(seed)
    kinds = (unary, unary, stream, stream, stream, stream, cancelled, too_large)
    calls = [
        draw.choice(kinds)(draw.choice(channels), random.Random(draw.randrange(1 << 30)))
        for _ in range(num_calls)
    ]
    await asyncio.wait_for(asyncio.gather(*calls), PATIENCE_S)
    for channel in channels:
        await channel.close()
    deadline_s = asyncio.get_running_loop().time() + PATIENCE_S
    while door._num_calls or echo.num_running:
        assert asyncio.get_running_loop().time() < deadline_s
        await asyncio.sleep(0.01)
    assert (door._num_held_bytes, door.num_slow_readers) == (0, 0)
    assert echo.num_calls > num_calls / 4
    watch.cancel()
    await door.close(0.0)
    await server.stop(0.0)


def test_what_is_sent_comes_back() -> None:
    asyncio.run(mixes(1, 120))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 12))
def test_what_is_sent_comes_back_at_length(seed: int) -> None:
    asyncio.run(mixes(seed, 400))
