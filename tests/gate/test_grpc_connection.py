"""A gRPC connection to the gate, frame by frame: what passes, and what ends it."""

from __future__ import annotations

import asyncio

import pytest
from hpack import Encoder

from helpers.http2_wire import (
    ANSWER_HEAD,
    BAD,
    GOOD,
    INFER,
    LIVE,
    OK,
    PING,
    STREAM,
    FrameSetting,
    Wire,
    call,
    data,
    head_fields,
    headers,
    request_of,
    run,
)
from naiad.gate import grpc_door
from naiad.gate import http2_frames as http2
from naiad.gate.grpc_framing import framed
from naiad.gate.grpc_status import Status

PRIORITY_OF_1 = http2.frame(http2.PRIORITY, 0, 1, bytes(5))


@pytest.mark.parametrize("step", [1, 7, 1 << 20])
def test_a_call_passes_however_it_is_cut(step: int) -> None:
    block = Encoder().encode(
        head_fields(
            STREAM,
            (b"grpc-timeout", b"3S"),
            (b"traceparent", b"00-" + b"1" * 32 + b"-" + b"2" * 16 + b"-01"),
            (b"x-secret", b"y" * 300),
            (b"some-bin", b"AAEC"),
        )
    )
    body = framed(GOOD) + framed(GOOD)
    asked = (
        http2.frame(http2.HEADERS, http2.PADDED | http2.HAS_PRIORITY, 5, b"\2" + bytes(5) + block[:9] + b"xx")
        + http2.frame(http2.CONTINUATION, 0, 5, block[9:20])
        + http2.frame(http2.CONTINUATION, http2.END_HEADERS, 5, block[20:])
        + http2.frame(http2.DATA, http2.PADDED, 5, b"\3" + body[:8] + bytes(3))
        + PING
        + http2.frame(77, 1, 5, b"unknown")
        + data(5, body[8:], ends=True)
    )
    told = (
        headers(1, ANSWER_HEAD)
        + data(1, framed(b"one") + framed(b"two")[:3])
        + http2.frame(http2.PING, 0, 0, b"abcdefgh")
        + data(1, framed(b"two")[3:])
        + http2.frame(http2.DATA, http2.PADDED, 1, b"\1" + framed(b"") + b"\0")
        + headers(1, (*OK, (b"said-last", b"yes")), ends=True)
    )

    async def work(setting: FrameSetting) -> None:
        client = await setting.connect({99: 5})
        for at in range(0, len(asked), step):
            client.send(asked[at : at + step])
            await asyncio.sleep(0)
        server = await setting.server()
        fields, received, stream_id = await request_of(server)
        assert stream_id == 1
        assert received == body
        assert fields == [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", STREAM),
            (":authority", setting.door.server_address),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
            ("user-agent", "naiad-gate"),
            ("traceparent", "00-" + "1" * 32 + "-" + "2" * 16 + "-01"),
        ]
        for at in range(0, len(told), step):
            server.send(told[at : at + step])
            await asyncio.sleep(0)
        assert (await client.frame(http2.PING))[:4] == (http2.PING, http2.ACK, 0, b"12345678")
        assert await client.fields(5) == {":status": "200", "content-type": "application/grpc"}
        answer = b""
        while (each := await client.frame()).kind == http2.DATA:
            assert (each.flags, each.stream_id) == (0, 5)
            answer += each.payload
        assert answer == framed(b"one") + framed(b"two") + framed(b"")
        assert (each.kind, each.flags) == (http2.HEADERS, http2.END_HEADERS | http2.END_STREAM)
        assert client.decoded(each) == {"grpc-status": "0", "said-last": "yes"}
        assert (await server.frame(http2.PING))[:4] == (http2.PING, http2.ACK, 0, b"abcdefgh")

    run(work)


def test_settings_pass_as_far_as_they_speak_of_answers() -> None:
    async def work(setting: FrameSetting) -> None:
        client = await setting.connect(
            {
                http2.HEADER_TABLE_SIZE: 0,
                http2.ENABLE_PUSH: 1,
                http2.MAX_CONCURRENT_STREAMS: 7,
                http2.INITIAL_WINDOW_SIZE: 70_000,
                http2.MAX_FRAME_SIZE: 1 << 20,
                http2.MAX_HEADER_LIST_SIZE: 9000,
                0xFE03: 1,
            }
        )
        client.send(http2.window_update(0, 1000), call(1, STREAM, ends=False))
        server = await setting.server()
        first = await server.any_frame()
        expected = {
            http2.HEADER_TABLE_SIZE: 0,
            http2.ENABLE_PUSH: 0,
            http2.INITIAL_WINDOW_SIZE: 70_000,
            http2.MAX_HEADER_LIST_SIZE: 9000,
        }
        assert http2.read_settings(first.payload) == expected
        update = await server.any_frame()
        assert update[:] == (http2.WINDOW_UPDATE, 0, 0, (1000).to_bytes(4, "big"))
        await server.frame(http2.HEADERS)
        client.send(http2.settings({http2.INITIAL_WINDOW_SIZE: 80_000, http2.HEADER_TABLE_SIZE: 100}))
        while (changed := await server.frame(http2.SETTINGS)).flags & http2.ACK:
            pass
        assert http2.read_settings(changed.payload)[http2.INITIAL_WINDOW_SIZE] == 80_000
        client.send(http2.window_update(1, 5))
        update = await server.frame(http2.WINDOW_UPDATE)
        assert (update.stream_id, update.payload) == (1, (5).to_bytes(4, "big"))

    run(work)


def _block(*fields: tuple[bytes, bytes]) -> bytes:
    return headers(1, fields)


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (http2.frame(http2.PUSH_PROMISE, 0, 1, bytes(4)), http2.PROTOCOL_ERROR),
        (headers(2, head_fields()), http2.PROTOCOL_ERROR),
        (headers(0, head_fields()), http2.PROTOCOL_ERROR),
        (call(3, LIVE, b"") + headers(1, head_fields()), http2.STREAM_CLOSED),
        (call(1, STREAM, b"", ends=False) + headers(1, head_fields()), http2.STREAM_CLOSED),
        (call(1, STREAM, b"") + data(1, b""), http2.STREAM_CLOSED),
        (data(1, b"a"), http2.PROTOCOL_ERROR),
        (data(0, b"a"), http2.PROTOCOL_ERROR),
        (http2.rst_stream(1, 0), http2.PROTOCOL_ERROR),
        (http2.window_update(1, 1), http2.PROTOCOL_ERROR),
        (http2.window_update(0, 0), http2.PROTOCOL_ERROR),
        (http2.window_update(0, http2.MAX_WINDOW), http2.FLOW_CONTROL_ERROR),
        (
            call(1, STREAM, ends=False) + http2.window_update(1, http2.MAX_WINDOW),
            http2.FLOW_CONTROL_ERROR,
        ),
        (http2.settings({http2.INITIAL_WINDOW_SIZE: 1 << 31}), http2.FLOW_CONTROL_ERROR),
        (http2.settings({http2.MAX_FRAME_SIZE: 100}), http2.PROTOCOL_ERROR),
        (http2.settings({http2.ENABLE_PUSH: 2}), http2.PROTOCOL_ERROR),
        (http2.frame(http2.SETTINGS, 0, 0, bytes(5)), http2.FRAME_SIZE_ERROR),
        (http2.frame(http2.SETTINGS, http2.ACK, 0, bytes(6)), http2.FRAME_SIZE_ERROR),
        (http2.frame(http2.SETTINGS, 0, 1), http2.PROTOCOL_ERROR),
        (http2.frame(http2.PING, 0, 0, bytes(7)), http2.FRAME_SIZE_ERROR),
        (http2.frame(http2.PING, 0, 1, bytes(8)), http2.PROTOCOL_ERROR),
        (http2.frame(http2.GOAWAY, 0, 0, bytes(7)), http2.FRAME_SIZE_ERROR),
        (http2.frame(http2.PRIORITY, 0, 0, bytes(5)), http2.PROTOCOL_ERROR),
        (http2.frame(http2.PRIORITY, 0, 1, bytes(4)), http2.FRAME_SIZE_ERROR),
        (http2.frame(http2.WINDOW_UPDATE, 0, 0, bytes(3)), http2.FRAME_SIZE_ERROR),
        (http2.frame(http2.CONTINUATION, 0, 1), http2.PROTOCOL_ERROR),
        (http2.frame(http2.HEADERS, 0, 1, b"") + PING, http2.PROTOCOL_ERROR),
        (
            http2.frame(http2.HEADERS, 0, 1) + http2.frame(http2.CONTINUATION, 0, 3),
            http2.PROTOCOL_ERROR,
        ),
        (http2.frame(http2.HEADERS, http2.END_HEADERS, 1, b"\x80"), http2.COMPRESSION_ERROR),
        (_block((b"a", bytes(16_000)), (b"b", bytes(16_000)), (b"c", bytes(900))), http2.ENHANCE_YOUR_CALM),
        (
            http2.frame(http2.HEADERS, 0, 1) + http2.frame(http2.CONTINUATION, 0, 1) * 9,
            http2.ENHANCE_YOUR_CALM,
        ),
        (
            http2.settings({http2.INITIAL_WINDOW_SIZE: 0})
            + call(1, STREAM, BAD, ends=False)
            + data(1, bytes(16_000)) * 9,
            http2.FLOW_CONTROL_ERROR,
        ),
        (PING * 2001, http2.ENHANCE_YOUR_CALM),
        (http2.settings({}) * 2001, http2.ENHANCE_YOUR_CALM),
        (PRIORITY_OF_1 * 2001, http2.ENHANCE_YOUR_CALM),
        (http2.frame(77, 0, 0) * 2001, http2.ENHANCE_YOUR_CALM),
        (call(1, STREAM, ends=False) + data(1, b"") * 2001, http2.ENHANCE_YOUR_CALM),
        (
            b"".join(headers(n, head_fields()) + http2.rst_stream(n, 8) for n in range(1, 2005, 2)),
            http2.ENHANCE_YOUR_CALM,
        ),
        (
            b"".join(headers(n, head_fields("/x")) for n in range(1, 2005, 2)),
            http2.ENHANCE_YOUR_CALM,
        ),
    ],
)
def test_what_is_against_http2_or_floods_ends_the_connection(raw: bytes, code: int) -> None:
    async def work(setting: FrameSetting) -> None:
        client = await setting.connect()
        client.send(raw)
        assert await client.goaway_code() == code
        assert setting.door.num_refused > 0
        other = await setting.connect()
        other.send(PING)
        await other.frame(http2.PING)

    # Before a client is told to go on, a second may not pass.
    run(work)


@pytest.mark.parametrize("raw", [PING * 400, http2.settings({http2.INITIAL_WINDOW_SIZE: 70_000}) * 20])
def test_a_flood_ends_the_connection_while_an_answer_comes_too(raw: bytes) -> None:
    async def work(setting: FrameSetting) -> None:
        client = await setting.connect()
        client.send(call(1, STREAM, GOOD, ends=False))
        server = await setting.server()
        server.send(headers(1, ANSWER_HEAD))
        await client.fields(1)

        async def answer() -> None:
            while True:
                server.send(data(1, framed(b"token")))
                client.send(raw)
                await asyncio.sleep(0.005)

        answering = asyncio.create_task(answer())
        assert await client.goaway_code() == http2.ENHANCE_YOUR_CALM
        answering.cancel()

    run(work)


def test_a_client_may_acknowledge_every_part_of_an_answer() -> None:
    async def work(setting: FrameSetting) -> None:
        client = await setting.connect()
        client.send(call(1, STREAM, GOOD, ends=False))
        server = await setting.server()
        server.send(headers(1, ANSWER_HEAD))
        await client.fields(1)
        for _ in range(3000):
            server.send(data(1, framed(b"token")))
            assert (await client.frame()).kind == http2.DATA
            client.send(http2.window_update(0, 10), http2.window_update(1, 10))
        server.send(headers(1, OK, ends=True))
        assert (await client.fields(1))["grpc-status"] == "0"

    run(work)


def test_what_does_not_begin_as_http2_is_ended() -> None:
    async def work(setting: FrameSetting) -> None:
        for raw, code in (
            (b"POST / HTTP/1.1\r\n\r\n", http2.PROTOCOL_ERROR),
            (http2.PREFACE + PING, http2.PROTOCOL_ERROR),
            (http2.PREFACE + http2.frame(http2.SETTINGS, http2.ACK, 0), http2.PROTOCOL_ERROR),
        ):
            client = Wire(*await asyncio.open_connection("127.0.0.1", setting.port))
            client.send(raw)
            assert await client.goaway_code() == code

    run(work)


def test_no_more_than_so_many_streams_are_open() -> None:
    async def work(setting: FrameSetting) -> None:
        client = await setting.connect()
        client.send(*(headers(n, head_fields(INFER)) for n in range(1, 2 * 257 + 1, 2)))
        ended = await client.frame()
        assert ended[:] == (http2.RST_STREAM, 0, 513, http2.REFUSED_STREAM.to_bytes(4, "big"))

    run(work)


def test_a_door_that_closes_lets_calls_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_door, "_LOOK_S", 0.02)

    async def work(setting: FrameSetting) -> None:
        idle, client = await setting.connect(), await setting.connect()
        client.send(call(1, STREAM, GOOD, ends=False), call(3, STREAM, GOOD, ends=False))
        server = await setting.server()
        await server.frame(http2.DATA)
        closing = asyncio.create_task(setting.door.close(1.0))
        assert await idle.goaway_code() == http2.NO_ERROR
        assert (await client.frame()).kind == http2.GOAWAY
        client.send(call(5, STREAM, GOOD))
        assert (await client.frame())[:3] == (http2.RST_STREAM, 0, 5)
        server.send(headers(1, (*ANSWER_HEAD, *OK), ends=True))
        assert (await client.status(1))[0] == 0
        assert (await client.frame())[:3] == (http2.RST_STREAM, 0, 1)
        status, text = await client.status(3)
        assert (status, "stopped" in text) == (Status.UNAVAILABLE, True)
        await closing
        with pytest.raises(ConnectionRefusedError):
            await setting.connect()

    run(work)
