"""The gate's gRPC connection to the server: how it ends, and what its calls are told."""

from __future__ import annotations

import pytest

from helpers.http2_wire import (
    ANSWER_HEAD,
    GOOD,
    HOUSEKEEPING,
    LIVE,
    OK,
    STREAM,
    FrameSetting,
    call,
    data,
    headers,
    request_of,
    run,
)
from naiad.gate import http2_frames as http2
from naiad.gate.grpc_framing import framed
from naiad.gate.grpc_status import Status


def test_a_server_that_goes_takes_its_calls_along_and_comes_back() -> None:
    async def work(setting: FrameSetting) -> None:
        client = await setting.connect()
        client.send(call(1, STREAM, GOOD, ends=False), call(3, LIVE, b""))
        server = await setting.server()
        await server.frame(http2.DATA)
        server.send(headers(1, ANSWER_HEAD), data(1, framed(bytes(40_000))[:16_000]))
        await client.fields(1)
        server.writer.close()
        ends = {}
        while len(ends) < 2:
            each = await client.frame(http2.HEADERS)
            ends[each.stream_id] = client.decoded(each)
        assert [ends[n]["grpc-status"] for n in (1, 3)] == ["14", "14"]
        assert (":status" in ends[1], ":status" in ends[3]) == (False, True)
        client.send(call(5, LIVE, b""))
        server = await setting.server()
        assert (await request_of(server))[2] == 1
        server.send(headers(1, ANSWER_HEAD), data(1, framed(bytes(9000))), headers(1, OK, ends=True))
        await client.fields(5)
        assert len((await client.frame(http2.DATA)).payload) == 9005
        assert (await client.status(5))[0] == 0

    run(work)


def test_a_server_that_says_goodbye_is_left_in_order() -> None:
    async def work(setting: FrameSetting) -> None:
        client = await setting.connect()
        client.send(call(1, LIVE, b""), call(3, LIVE, b""))
        server = await setting.server()
        await request_of(server)
        await request_of(server)
        server.send(http2.goaway(1, http2.NO_ERROR))
        assert (await client.frame()).kind == http2.GOAWAY
        reset = await client.frame()
        assert reset[:] == (http2.RST_STREAM, 0, 3, http2.REFUSED_STREAM.to_bytes(4, "big"))
        client.send(call(5, LIVE, b""))
        assert (await client.frame())[:3] == (http2.RST_STREAM, 0, 5)
        server.send(headers(1, (*ANSWER_HEAD, *OK), ends=True))
        assert (await client.status(1))[0] == 0
        assert await client.end() == []

    run(work)


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        http2.frame(http2.PUSH_PROMISE, 0, 1, bytes(4)),
        http2.frame(http2.RST_STREAM, 0, 1, b""),
        http2.frame(http2.CONTINUATION, 0, 1, b""),
        http2.frame(http2.GOAWAY, 0, 0, b""),
        http2.frame(http2.DATA, http2.PADDED, 1, b"\5"),
    ],
)
def test_a_server_that_speaks_no_http2_is_not_believed(raw: bytes) -> None:
    async def work(setting: FrameSetting) -> None:
        client = await setting.connect()
        client.send(call(1, LIVE, b""))
        server = await setting.server()
        await request_of(server)
        server.send(raw)
        assert (await client.status(1))[0] == Status.UNAVAILABLE

    run(work)


def test_a_reset_of_the_server_passes() -> None:
    async def work(setting: FrameSetting) -> None:
        client = await setting.connect()
        client.send(call(1, LIVE, b""))
        server = await setting.server()
        await request_of(server)
        server.send(http2.rst_stream(1, http2.ENHANCE_YOUR_CALM))
        ended = await client.frame()
        assert ended[:] == (http2.RST_STREAM, 0, 1, http2.ENHANCE_YOUR_CALM.to_bytes(4, "big"))

    run(work)


def test_a_client_that_goes_takes_its_connection_to_the_server_along() -> None:
    async def work(setting: FrameSetting) -> None:
        client = await setting.connect()
        client.send(call(1, STREAM, GOOD, ends=False))
        server = await setting.server()
        await server.frame(http2.DATA)
        client.writer.close()
        rest = [each for each in await server.end() if each.kind not in HOUSEKEEPING]
        assert [each.kind for each in rest] == [http2.DATA, http2.RST_STREAM]

    run(work)
