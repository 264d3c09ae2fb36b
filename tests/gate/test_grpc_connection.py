"""The gate's gRPC door between a raw client and a raw server: every frame is looked at."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Awaitable, Callable

import pytest
from hpack import Encoder
from tritonclient.grpc import service_pb2

from helpers.http2_wire import (
    ANSWER_HEAD,
    HOUSEKEEPING,
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
from naiad.gate import grpc_call, grpc_connection, grpc_door
from naiad.gate import http2_frames as http2
from naiad.gate.grpc_framing import PREFIX, framed
from naiad.gate.grpc_status import Status
from naiad.gate.http2_frames import Frame
from naiad.gate.limits import Limits

TIMEOUT_S = 60.0
GOOD = service_pb2.ModelInferRequest(model_name="m", id="7").SerializeToString()
BAD = service_pb2.ModelInferRequest(id="bad", parameters={"triton_x": {"int64_param": 1}}).SerializeToString()
PRIORITY_OF_1 = http2.frame(http2.PRIORITY, 0, 1, bytes(5))
PING = http2.frame(http2.PING, 0, 0, b"12345678")


def run(work: Callable[[FrameSetting], Awaitable[None]], limits: Limits | None = None) -> None:
    async def inside() -> None:
        async with a_frame_door(limits) as setting:
            await asyncio.wait_for(work(setting), TIMEOUT_S)

    asyncio.run(inside())


def error_of(each: Frame) -> str:
    """The error in a stream that a frame of DATA is."""
    assert PREFIX.unpack_from(each.payload) == (0, len(each.payload) - PREFIX.size)
    answer = service_pb2.ModelStreamInferResponse.FromString(each.payload[PREFIX.size :])
    assert answer.infer_response.id == "bad"
    return str(answer.error_message)


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
            ("grpc-timeout", "3S"),
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


def test_an_error_waits_until_a_message_of_the_server_is_complete() -> None:
    async def work(setting: FrameSetting) -> None:
        client = await setting.connect()
        client.send(call(1, STREAM, GOOD, ends=False))
        server = await setting.server()
        await server.frame(http2.DATA)
        message = framed(bytes(1000))
        server.send(headers(1, ANSWER_HEAD), data(1, message[:3]), data(1, message[3:500]))
        await client.fields(1)
        assert [len((await client.frame()).payload) for _ in range(2)] == [3, 497]
        client.send(data(1, framed(BAD) + framed(GOOD)), PING)
        await client.frame(http2.PING)
        server.send(data(1, message[500:]), data(1, framed(b"next")))
        assert (await client.frame()).payload == message[500:]
        assert "triton_x" in error_of(await client.frame())
        assert (await client.frame()).payload == framed(b"next")
        assert (await server.frame()).payload == framed(GOOD), "the message behind it passes"

    run(work)


@pytest.mark.parametrize("sends_head", [True, False])
def test_an_error_before_the_servers_head_needs_a_head(sends_head: bool) -> None:
    async def work(setting: FrameSetting) -> None:
        client = await setting.connect()
        client.send(call(1, STREAM, BAD))
        assert (await client.fields(1))[":status"] == "200"
        assert "triton_x" in error_of(await client.frame())
        server = await setting.server()
        assert (await request_of(server))[1] == b""
        if sends_head:
            server.send(headers(1, ANSWER_HEAD), data(1, framed(b"a")), headers(1, OK, ends=True))
            assert (await client.frame()).payload == framed(b"a")
        else:
            server.send(headers(1, (*ANSWER_HEAD, *OK, (b"why", b"so")), ends=True))
        fields = await client.fields(1)
        assert fields == {"grpc-status": "0", **({} if sends_head else {"why": "so"})}

    run(work)


@pytest.mark.parametrize("stream_window", [2000, http2.DEFAULT_WINDOW])
def test_the_gates_own_data_is_counted_in_the_clients_windows(stream_window: int) -> None:
    """With 2,000 bytes the stream's window is the smaller one, otherwise both are the same."""

    async def work(setting: FrameSetting) -> None:
        client = await setting.connect({http2.INITIAL_WINDOW_SIZE: stream_window})
        client.send(call(1, STREAM, BAD, ends=False))
        await client.fields(1)
        num_injected = len((await client.frame()).payload)
        server = await setting.server()
        server.send(headers(1, ANSWER_HEAD))
        message = framed(bytes(stream_window - PREFIX.size))
        server.send(*(data(1, message[at : at + 1500]) for at in range(0, len(message), 1500)))
        received = 0
        while received < stream_window - num_injected:
            received += len((await client.frame()).payload)
        assert received == stream_window - num_injected
        client.send(PING)
        await client.frame(http2.PING)
        # What the gate has used is not granted to the server, which has used all that it knows of.
        grant = num_injected + 100
        client.send(http2.window_update(1, grant), http2.window_update(0, grant))
        rest = 0
        while rest < num_injected:
            rest += len((await client.frame()).payload)
        assert rest == num_injected
        client.send(PING)
        await client.frame(http2.PING)
        granted = {0: 0, 1: 0}
        server.send(PING)
        while (each := await server.any_frame()).kind != http2.PING:
            if each.kind == http2.WINDOW_UPDATE:
                granted[each.stream_id] += int.from_bytes(each.payload, "big")
        assert granted == {0: 100, 1: 100}

    run(work)


def test_a_window_that_is_made_smaller_holds_what_is_under_way() -> None:
    async def work(setting: FrameSetting) -> None:
        client = await setting.connect()
        client.send(call(1, STREAM, GOOD, ends=False))
        server = await setting.server()
        await server.frame(http2.DATA)
        client.send(http2.settings({http2.INITIAL_WINDOW_SIZE: 10}))
        assert (await client.frame(http2.SETTINGS)).flags == 0
        assert (await client.frame(http2.SETTINGS)).flags == http2.ACK
        assert (await client.frame(http2.SETTINGS)).flags == http2.ACK
        server.send(headers(1, ANSWER_HEAD), data(1, framed(bytes(20))), headers(1, OK, ends=True))
        await client.fields(1)
        assert len((await client.frame()).payload) == 10
        client.send(http2.window_update(1, 3))
        assert len((await client.frame()).payload) == 3
        client.send(http2.window_update(1, 100))
        assert len((await client.frame()).payload) == 12
        assert (await client.status(1))[0] == 0

    run(work)


def test_a_call_that_is_cancelled_frees_what_its_answer_takes() -> None:
    async def work(setting: FrameSetting) -> None:
        client = await setting.connect()
        client.send(call(1, STREAM, GOOD, ends=False), call(3, STREAM, GOOD, ends=False))
        server = await setting.server()
        assert [(await server.frame()).kind for _ in range(4)] == [http2.HEADERS, http2.DATA] * 2
        client.send(http2.rst_stream(1, http2.CANCEL))
        assert (await server.frame())[:] == (http2.RST_STREAM, 0, 1, http2.CANCEL.to_bytes(4, "big"))
        server.send(headers(1, ANSWER_HEAD), data(1, bytes(5000)), headers(1, OK, ends=True))
        update = await server.frame(http2.WINDOW_UPDATE)
        assert (update.stream_id, update.payload) == (0, (5000).to_bytes(4, "big"))
        server.send(headers(3, (*ANSWER_HEAD, *OK), ends=True))
        assert (await client.status(3))[0] == 0
        ended = await client.frame()
        assert (ended.kind, ended.stream_id) == (http2.RST_STREAM, 3), "it was not half-closed"
        assert (await server.frame())[:3] == (http2.RST_STREAM, 0, 3)

    run(work)


def test_the_servers_windows_and_number_of_streams_hold() -> None:
    async def work(setting: FrameSetting) -> None:
        client = await setting.connect()
        client.send(call(1, STREAM, ends=False))
        server = await setting.server({http2.INITIAL_WINDOW_SIZE: 4, http2.MAX_CONCURRENT_STREAMS: 1})
        await server.frame(http2.HEADERS)
        while not (await server.frame(http2.SETTINGS)).flags & http2.ACK:
            pass
        client.send(data(1, framed(GOOD), ends=True), call(3, LIVE, b""))
        assert (await server.frame()).payload == framed(GOOD)[:4]
        server.send(http2.window_update(1, 2))
        assert (await server.frame()).payload == framed(GOOD)[4:6]
        server.send(http2.settings({http2.INITIAL_WINDOW_SIZE: 1000, http2.MAX_CONCURRENT_STREAMS: 1}))
        last = await server.frame()
        assert (last.payload, last.flags) == (framed(GOOD)[6:], http2.END_STREAM)
        server.send(headers(1, (*ANSWER_HEAD, *OK), ends=True))
        assert (await request_of(server))[2] == 3

    run(work)


def test_a_client_gets_back_the_window_of_what_was_taken() -> None:
    message = service_pb2.ModelInferRequest(raw_input_contents=[bytes(900_000)]).SerializeToString()

    async def work(setting: FrameSetting) -> None:
        client = await setting.connect()
        client.send(headers(1, head_fields(INFER)))
        window = dict.fromkeys((0, 1), 0)
        body, sent = framed(message), 0
        window[0] = http2.DEFAULT_WINDOW
        while sent < len(body):
            step = min(http2.MAX_FRAME_BYTES, len(body) - sent, *window.values())
            if step <= 0:
                each = await client.frame(http2.WINDOW_UPDATE, http2.SETTINGS)
                if each.kind == http2.WINDOW_UPDATE:
                    window[each.stream_id] += int.from_bytes(each.payload, "big")
                elif not each.flags:
                    window[1] += http2.read_settings(each.payload)[http2.INITIAL_WINDOW_SIZE]
                continue
            client.send(data(1, body[sent : sent + step], ends=sent + step == len(body)))
            sent += step
            window = {key: value - step for key, value in window.items()}
        server = await setting.server({http2.INITIAL_WINDOW_SIZE: 2 << 20})
        server.send(http2.window_update(0, 2 << 20))
        assert (await request_of(server))[1] == body

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


def test_a_client_that_reads_gets_what_is_left_when_the_connection_closes() -> None:
    class Transport:
        unsent, is_aborted = 400_000, False

        def get_write_buffer_size(self) -> int:
            return self.unsent

        def close(self) -> None: ...

        def abort(self) -> None:
            self.is_aborted = True

    async def work(setting: FrameSetting) -> None:
        await setting.connect()
        (connection,) = setting.door._connections
        real, connection._transport = connection._transport, Transport()
        connection.close()
        now_s = asyncio.get_running_loop().time()
        for _ in range(10):
            now_s += 4.0
            connection._transport.unsent -= 20_000
            connection._loop = FixedTime(now_s)
            connection.look(now_s)
            assert not connection._transport.is_aborted
        connection.look(now_s + 6.0)
        assert connection._transport.is_aborted
        real.abort()

    run(work)


def test_a_call_that_is_not_read_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_door, "_LOOK_S", 0.02)

    async def work(setting: FrameSetting) -> None:
        client = await setting.connect({http2.INITIAL_WINDOW_SIZE: 0})
        client.send(headers(1, head_fields(STREAM)), headers(3, head_fields(STREAM)))
        client.send(http2.window_update(3, 1 << 20))
        server = await setting.server()
        server.send(headers(1, ANSWER_HEAD), headers(3, ANSWER_HEAD))
        client.send(data(1, framed(BAD)))
        has_ended, num_tokens = False, 0
        while not has_ended or num_tokens < 200:
            server.send(data(3, framed(b"token")))
            each = await client.frame()
            num_tokens += each.kind == http2.DATA and each.stream_id == 3
            has_ended |= (
                each.kind == http2.HEADERS and each.stream_id == 1 and bool(each.flags & http2.END_STREAM)
            )
            if each.kind == http2.DATA:
                client.send(http2.window_update(0, 10))
        assert setting.door.num_slow_readers == 1

    run(work, Limits(slow_reader_s=0.2))


def test_a_client_is_not_late_while_the_server_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_door, "_LOOK_S", 0.02)

    async def work(setting: FrameSetting) -> None:
        client = await setting.connect()
        client.send(headers(1, head_fields(STREAM)))
        server = await setting.server({http2.INITIAL_WINDOW_SIZE: 0})
        large = service_pb2.ModelInferRequest(raw_input_contents=[bytes(100_000)]).SerializeToString()
        sent = framed(large) * 2
        room = grpc_call.REQUEST_WINDOW
        client.send(*(data(1, sent[at : at + 16_000]) for at in range(0, 128_000, 16_000)))
        client.send(data(1, sent[128_000:room]))
        await asyncio.sleep(1.0)
        server.send(http2.window_update(0, 1 << 20), http2.window_update(1, 1 << 20))
        client.send(*(data(1, sent[at : at + 16_000]) for at in range(room, len(sent), 16_000)))
        received = b""
        while len(received) < len(sent):
            received += (await server.frame(http2.DATA)).payload
        assert received == sent

    run(work, Limits(body_s=0.3))


def test_a_server_that_comes_while_the_client_does_not_read_is_not_read() -> None:
    async def work(setting: FrameSetting) -> None:
        client = await setting.connect()
        (connection,) = setting.door._connections
        connection.pause_writing()
        client.send(call(1, STREAM, GOOD, ends=False))
        server = await setting.server()
        upstream = connection._calls._upstream
        assert upstream is not None
        assert not upstream._transport.is_reading()
        connection.resume_writing()
        server.send(headers(1, (*ANSWER_HEAD, *OK), ends=True))
        assert (await client.fields(1))["grpc-status"] == "0"

    run(work)


class FixedTime:
    """A loop whose time stands still."""

    def __init__(self, now_s: float) -> None:
        self._now_s = now_s

    def time(self) -> float:
        return self._now_s


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


@pytest.mark.parametrize(
    "fields",
    [
        ((b":method", b"GET"), *head_fields()[1:]),
        head_fields()[1:],
        (*head_fields(), (b":path", STREAM.encode())),
        (head_fields()[4], *head_fields()[:4], head_fields()[5]),
        (*head_fields(), (b":protocol", b"websocket")),
        (*head_fields(), (b"Upper", b"a")),
        (*head_fields(), (b"a b", b"a")),
        (*head_fields(), (b"", b"a")),
        (*head_fields(), (b"a", b"b\r\nc: d")),
        (*head_fields(), (b"connection", b"close")),
        (*head_fields(), (b"transfer-encoding", b"chunked")),
        (*head_fields()[:4], (b"te", b"gzip"), head_fields()[5]),
        (*head_fields()[:5], (b"content-type", b"application/json")),
        head_fields()[:5],
    ],
)
def test_a_head_that_is_no_request_ends_its_stream(fields: tuple[tuple[bytes, bytes], ...]) -> None:
    async def work(setting: FrameSetting) -> None:
        client = await setting.connect()
        client.send(headers(1, fields), call(3, LIVE, b""))
        ended = await client.frame()
        assert ended[:] == (http2.RST_STREAM, 0, 1, http2.PROTOCOL_ERROR.to_bytes(4, "big"))
        assert (await request_of(await setting.server()))[2] == 1
        assert setting.door.num_refused == 1

    run(work)


@pytest.mark.parametrize(
    ("request_", "status", "named"),
    [
        (call(1, "/x", b""), Status.UNIMPLEMENTED, "no such method"),
        (
            headers(1, head_fields(LIVE, (b"triton_grpc_error", b"1")), ends=True),
            Status.INVALID_ARGUMENT,
            "triton_grpc_error",
        ),
        (
            headers(1, head_fields(LIVE, (b"a", b"x" * 17_000)), ends=True),
            Status.RESOURCE_EXHAUSTED,
            "16384",
        ),
        (headers(1, head_fields(LIVE, (b"grpc-encoding", b"zstd"))), Status.UNIMPLEMENTED, "zstd"),
        (headers(1, head_fields(LIVE, (b"grpc-timeout", b"3 days"))), Status.INVALID_ARGUMENT, "3 days"),
        (headers(1, head_fields(LIVE), ends=True), Status.UNIMPLEMENTED, "got none"),
        (call(1, LIVE, b"", b""), Status.UNIMPLEMENTED, "got more"),
        (headers(1, head_fields(LIVE)) + data(1, b"\0\0", ends=True), Status.INTERNAL, "within a message"),
        (headers(1, head_fields(LIVE)) + data(1, b"\2\0\0\0\0"), Status.INTERNAL, "expected 0 or 1"),
        (headers(1, head_fields(LIVE)) + data(1, b"\0\xff\0\0\0"), Status.RESOURCE_EXHAUSTED, "1000"),
        (call(1, INFER, BAD), Status.INVALID_ARGUMENT, "triton_x"),
        (call(1, INFER, b"\xff"), Status.INVALID_ARGUMENT, "no ModelInferRequest"),
    ],
)
def test_a_refused_call_does_not_reach_the_server(
    request_: bytes, status: Status, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A refused head is told when something follows it, or with the next look.
    monkeypatch.setattr(grpc_door, "_LOOK_S", 0.02)

    async def work(setting: FrameSetting) -> None:
        client = await setting.connect()
        client.send(request_)
        fields = await client.fields(1)
        assert (fields[":status"], fields["grpc-status"]) == ("200", str(int(status)))
        assert named in fields["grpc-message"]
        assert "gzip" in fields["grpc-accept-encoding"]
        assert (setting.accepted.empty(), setting.door.num_refused) == (True, 1)

    run(work, Limits(max_body_bytes=1000))


def test_compressed_requests_pass_inflated() -> None:
    packed = gzip.compress(GOOD)

    async def work(setting: FrameSetting) -> None:
        client = await setting.connect()
        client.send(headers(1, head_fields(INFER, (b"grpc-encoding", b"gzip"))))
        client.send(data(1, PREFIX.pack(1, len(packed)) + packed, ends=True))
        fields, body, _ = await request_of(await setting.server())
        assert body == framed(GOOD)
        assert not any(name == "grpc-encoding" for name, _ in fields)

    run(work)


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
        assert [each for each in await server.end() if each.kind not in HOUSEKEEPING] == []

    run(work)


def test_requests_that_are_held_together_have_a_limit() -> None:
    async def work(setting: FrameSetting) -> None:
        client = await setting.connect()
        part = PREFIX.pack(0, 50_000) + bytes(6000)
        client.send(*(headers(n, head_fields(INFER)) + data(n, part) for n in (1, 3)))
        status, text = await client.status(3)
        assert (status, "large requests" in text) == (Status.RESOURCE_EXHAUSTED, True)
        client.send(http2.rst_stream(1, http2.CANCEL), headers(5, head_fields(INFER)) + data(5, part), PING)
        await client.frame(http2.PING)
        assert setting.door._num_held_bytes == len(part)

    run(work, Limits(max_bodies_bytes=10_000))


def test_no_more_than_so_many_streams_are_open() -> None:
    async def work(setting: FrameSetting) -> None:
        client = await setting.connect()
        client.send(*(headers(n, head_fields(INFER)) for n in range(1, 2 * 257 + 1, 2)))
        ended = await client.frame()
        assert ended[:] == (http2.RST_STREAM, 0, 513, http2.REFUSED_STREAM.to_bytes(4, "big"))

    run(work)


def test_who_is_late_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_door, "_LOOK_S", 0.02)
    monkeypatch.setattr(grpc_connection, "_IDLE_S", 1.0)

    async def work(setting: FrameSetting) -> None:
        silent = Wire(*await asyncio.open_connection("127.0.0.1", setting.port))
        within_frame, within_block = await setting.connect(), await setting.connect()
        within_frame.send(b"\0\0\5")
        within_block.send(http2.frame(http2.HEADERS, 0, 1))
        for wire in (silent, within_frame, within_block):
            assert all(each.kind in HOUSEKEEPING for each in await wire.end())
        slow = await setting.connect()
        slow.send(headers(1, head_fields(INFER)), headers(3, head_fields(STREAM)), data(3, b"\0"))
        statuses = []
        for _ in range(2):
            each = await slow.frame(http2.HEADERS)
            statuses.append((each.stream_id, slow.decoded(each)["grpc-status"]))
        assert sorted(statuses) == [(1, "4"), (3, "4")]
        slow.send(headers(5, head_fields(STREAM)))
        await asyncio.sleep(0.5)
        slow.send(http2.rst_stream(5, http2.CANCEL))
        # It has nothing more to ask.
        assert await slow.goaway_code() == http2.NO_ERROR

    run(work, Limits(head_s=0.3, body_s=0.3))


@pytest.mark.parametrize("window", [0, 10])
def test_a_client_that_takes_nothing_of_its_window_gives_up_the_call(
    window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_door, "_LOOK_S", 0.02)

    async def work(setting: FrameSetting) -> None:
        client = await setting.connect({http2.INITIAL_WINDOW_SIZE: window})
        client.send(call(1, STREAM, GOOD, ends=False))
        server = await setting.server()
        await server.frame(http2.DATA)
        server.send(headers(1, ANSWER_HEAD), data(1, framed(b"12345")))
        await client.fields(1)
        if window:
            assert len((await client.frame()).payload) == window
        status, text = await client.status(1)
        assert (status, "read nothing" in text) == (Status.CANCELLED, True)
        assert (await server.frame())[:3] == (http2.RST_STREAM, 0, 1)
        assert setting.door.num_slow_readers == 1

    run(work, Limits(slow_reader_s=0.2))


def test_a_client_that_does_not_read_its_connection_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_door, "_LOOK_S", 0.02)

    async def work(setting: FrameSetting) -> None:
        client = await setting.connect({http2.INITIAL_WINDOW_SIZE: http2.MAX_WINDOW})
        client.send(http2.window_update(0, http2.MAX_WINDOW - http2.DEFAULT_WINDOW))
        client.send(call(1, STREAM, GOOD, ends=False))
        server = await setting.server()
        server.send(headers(1, ANSWER_HEAD))
        await client.fields(1)
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        message = data(1, framed(bytes(16_000)))
        while setting.door.num_slow_readers == 0:
            if server.writer.transport.get_write_buffer_size() < 1 << 20:
                server.send(message)
            await asyncio.sleep(0.0001)
        await server.end()

    run(work, Limits(slow_reader_s=0.2))


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
