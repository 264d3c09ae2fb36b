"""gRPC clients that are late with a request, or read nothing of an answer."""

from __future__ import annotations

import asyncio

import pytest
from tritonclient.grpc import service_pb2

from helpers.http2_wire import (
    ANSWER_HEAD,
    BAD,
    GOOD,
    HOUSEKEEPING,
    INFER,
    OK,
    STREAM,
    FrameSetting,
    Wire,
    call,
    data,
    head_fields,
    headers,
    run,
)
from naiad.gate import grpc_call, grpc_connection, grpc_door
from naiad.gate import http2_frames as http2
from naiad.gate.grpc_framing import framed
from naiad.gate.grpc_status import Status
from naiad.gate.limits import Limits


class FixedTime:
    """A loop whose time stands still."""

    def __init__(self, now_s: float) -> None:
        self._now_s = now_s

    def time(self) -> float:
        return self._now_s


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
        assert (await server.frame())[:3] == (http2.DATA, http2.END_STREAM, 1)
        assert (await server.frame())[:3] == (http2.RST_STREAM, 0, 1)
        assert setting.door.num_slow_readers == 1

    run(work, Limits(slow_reader_s=0.2))


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
