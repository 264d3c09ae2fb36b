"""What of a gRPC answer waits for its client: errors of the gate, and what windows have no room for."""

from __future__ import annotations

import asyncio

import pytest
from tritonclient.grpc import service_pb2

from helpers.http2_wire import (
    ANSWER_HEAD,
    BAD,
    GOOD,
    HOUSEKEEPING,
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
from naiad.gate import grpc_calls
from naiad.gate import http2_frames as http2
from naiad.gate.grpc_framing import PREFIX, framed
from naiad.gate.grpc_status import Status
from naiad.gate.limits import Limits

LARGE_ID = "i" * 1000
# Its error is larger than 2,000 bytes, because it names both.
LARGE_BAD = service_pb2.ModelInferRequest(
    id=LARGE_ID, model_name="m" * 1000, parameters={"triton_x": {"int64_param": 1}}
).SerializeToString()
PLENTY = 1 << 20


def error_in(raw: bytes, request_id: str = "bad") -> str:
    """The error that a whole message of a stream is."""
    assert PREFIX.unpack_from(raw) == (0, len(raw) - PREFIX.size)
    answer = service_pb2.ModelStreamInferResponse.FromString(raw[PREFIX.size :])
    assert answer.infer_response.id == request_id
    return str(answer.error_message)


async def data_of(client: Wire, stream_id: int, size: int) -> bytes:
    """The next bytes of an answer; nothing else may come meanwhile."""
    received = b""
    while len(received) < size:
        each = await client.frame()
        assert (each.kind, each.stream_id) == (http2.DATA, stream_id), each
        received += each.payload
    assert len(received) == size
    return received


async def pinged(wire: Wire) -> None:
    """What was sent before has been taken."""
    wire.send(PING)
    await wire.frame(http2.PING)


async def granted_to(server: Wire) -> dict[int, int]:
    """What the server is granted, up to now."""
    granted: dict[int, int] = {}
    server.send(PING)
    while (each := await server.any_frame()).kind != http2.PING:
        if each.kind == http2.WINDOW_UPDATE:
            granted[each.stream_id] = granted.get(each.stream_id, 0) + int.from_bytes(each.payload, "big")
    return granted


def test_a_stream_that_is_not_read_holds_up_no_other() -> None:
    async def work(setting: FrameSetting) -> None:
        client = await setting.connect({http2.INITIAL_WINDOW_SIZE: 2000})
        client.send(call(1, STREAM, BAD, ends=False), call(3, STREAM, GOOD, ends=False))
        await client.fields(1)
        num_error = len((await client.frame()).payload)
        server = await setting.server()
        message = framed(bytes(2000 - PREFIX.size))
        server.send(headers(1, ANSWER_HEAD), data(1, message), headers(1, OK, ends=True))
        assert await data_of(client, 1, 2000 - num_error) == message[: 2000 - num_error]
        server.send(headers(3, ANSWER_HEAD), data(3, framed(b"token")), headers(3, OK, ends=True))
        await client.fields(3)
        assert await data_of(client, 3, 10) == framed(b"token")
        assert (await client.status(3))[0] == 0
        assert (await client.frame())[:3] == (http2.RST_STREAM, 0, 3)
        client.send(http2.window_update(1, num_error))
        assert await data_of(client, 1, num_error) == message[2000 - num_error :]
        assert (await client.status(1))[0] == 0

    run(work)


def test_what_waits_of_one_answer_takes_nothing_of_the_connections_window() -> None:
    """Once the client has acknowledged what it has got, the server may fill the window for other calls."""

    async def work(setting: FrameSetting) -> None:
        client = await setting.connect({http2.INITIAL_WINDOW_SIZE: 2000})
        client.send(call(1, STREAM, BAD, ends=False))
        await client.fields(1)
        num_error = len((await client.frame()).payload)
        server = await setting.server()
        server.send(headers(1, ANSWER_HEAD), data(1, framed(bytes(2000 - PREFIX.size))))
        await data_of(client, 1, 2000 - num_error)
        client.send(http2.window_update(0, 2000))
        await pinged(client)
        assert (await granted_to(server))[0] == 2000

    run(work)


def test_nothing_is_read_from_the_server_while_the_client_takes_nothing() -> None:
    async def work(setting: FrameSetting) -> None:
        client = await setting.connect({http2.INITIAL_WINDOW_SIZE: PLENTY})
        client.send(call(1, STREAM, BAD, ends=False), call(3, STREAM, GOOD, ends=False))
        await client.fields(1)
        num_error = len((await client.frame()).payload)
        server = await setting.server()
        upstream = next(iter(setting.door._connections))._calls._upstream
        assert upstream is not None
        server.send(headers(3, ANSWER_HEAD))
        await client.fields(3)
        window = http2.DEFAULT_WINDOW
        message = framed(bytes(window - PREFIX.size))
        server.send(*(data(3, message[at : at + 16_000]) for at in range(0, window, 16_000)))
        await data_of(client, 3, window - num_error)
        while upstream._transport.is_reading():
            await asyncio.sleep(0)
        client.send(http2.window_update(0, PLENTY))
        await data_of(client, 3, num_error)
        assert upstream._transport.is_reading()
        server.send(headers(3, OK, ends=True))
        assert (await client.status(3))[0] == 0

    run(work)


def test_a_stream_of_which_too_much_waits_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_calls, "_MAX_KEPT_BYTES", 1000)

    async def work(setting: FrameSetting) -> None:
        client = await setting.connect()
        client.send(call(1, STREAM, GOOD, ends=False), call(3, STREAM, GOOD, ends=False))
        server = await setting.server()
        server.send(headers(1, ANSWER_HEAD), headers(3, ANSWER_HEAD))
        await client.fields(1)
        await client.fields(3)
        client.send(http2.settings({http2.INITIAL_WINDOW_SIZE: 20}), http2.window_update(3, PLENTY))
        await pinged(client)
        # This was under way when the window was made smaller.
        server.send(data(1, framed(bytes(1000))), data(3, framed(bytes(1000))), data(1, framed(bytes(20))))
        await data_of(client, 1, 20)
        await data_of(client, 3, 1005)
        assert (await client.fields(1))["grpc-status"] == str(int(Status.CANCELLED))
        assert (await client.frame())[:3] == (http2.RST_STREAM, 0, 1)
        assert setting.door.num_slow_readers == 1

    run(work)


def test_what_waits_of_answers_is_counted_with_the_requests() -> None:
    async def work(setting: FrameSetting) -> None:
        client = await setting.connect()
        client.send(call(1, STREAM, GOOD, ends=False))
        server = await setting.server()
        server.send(headers(1, ANSWER_HEAD))
        await client.fields(1)
        client.send(http2.settings({http2.INITIAL_WINDOW_SIZE: 20}))
        await pinged(client)
        server.send(data(1, framed(bytes(495))))
        await data_of(client, 1, 20)
        assert setting.door._num_held_bytes == 480
        server.send(data(1, framed(bytes(2000))))
        assert (await client.fields(1))["grpc-status"] == str(int(Status.RESOURCE_EXHAUSTED))

    run(work, Limits(max_bodies_bytes=2000))


def test_an_error_that_is_larger_than_a_window_goes_out_in_pieces() -> None:
    async def work(setting: FrameSetting) -> None:
        client = await setting.connect({http2.INITIAL_WINDOW_SIZE: 100})
        client.send(call(1, STREAM, LARGE_BAD, GOOD, ends=False))
        await client.fields(1)
        error = await data_of(client, 1, 100)
        size = PREFIX.size + PREFIX.unpack_from(error)[1]
        server = await setting.server()
        # The server's own messages wait until the error is whole.
        server.send(headers(1, ANSWER_HEAD), data(1, framed(b"a")))
        while size - len(error) > 500:
            client.send(http2.window_update(1, 500))
            error += await data_of(client, 1, 500)
        client.send(http2.window_update(1, PLENTY))
        error += await data_of(client, 1, size - len(error))
        assert "triton_x" in error_in(error, LARGE_ID)
        assert await data_of(client, 1, 6) == framed(b"a")
        assert (await server.frame(http2.DATA)).payload == framed(GOOD), "the message behind it passes"

    run(work)


def test_errors_that_wait_for_messages_do_not_keep_the_server_from_completing_them() -> None:
    """All errors together are larger than the connection's window."""
    streams = range(1, 129, 2)

    async def work(setting: FrameSetting) -> None:
        client = await setting.connect()
        client.send(*(call(n, STREAM, GOOD, ends=False) for n in streams))
        server = await setting.server()
        message = framed(bytes(1495))
        for n in streams:
            server.send(headers(n, ANSWER_HEAD), data(n, message[:1000]))
            await client.fields(n)
            assert await data_of(client, n, 1000) == message[:1000]
        client.send(*(data(n, framed(LARGE_BAD)) for n in streams))
        client.send(http2.window_update(0, 64_000), *(http2.window_update(n, 1000) for n in streams))
        await pinged(client)
        granted = await granted_to(server)
        assert granted == {0: 64_000, **dict.fromkeys(streams, 1000)}
        for n in streams:
            server.send(data(n, message[1000:]))
            assert await data_of(client, n, 500) == message[1000:]
            error = (await client.frame()).payload
            assert "triton_x" in error_in(error, LARGE_ID)
            client.send(http2.window_update(0, 500 + len(error)))

    run(work)


@pytest.mark.parametrize("has_head", [True, False])
def test_an_error_that_waits_comes_before_the_servers_end(has_head: bool) -> None:
    async def work(setting: FrameSetting) -> None:
        client = await setting.connect({http2.INITIAL_WINDOW_SIZE: 0})
        client.send(call(1, STREAM, BAD, ends=False))
        server = await setting.server()
        await server.frame(http2.HEADERS)
        if has_head:
            server.send(headers(1, ANSWER_HEAD), headers(1, (*OK, (b"why", b"so")), ends=True))
        else:
            server.send(headers(1, (*ANSWER_HEAD, *OK, (b"why", b"so")), ends=True))
        assert (await server.frame())[:3] == (http2.RST_STREAM, 0, 1)
        client.send(data(1, framed(GOOD)), http2.window_update(1, PLENTY))
        assert (await client.fields(1))[":status"] == "200"
        assert "triton_x" in error_in((await client.frame()).payload)
        assert await client.fields(1) == {"grpc-status": "0", "why": "so"}
        assert (await client.frame())[:3] == (http2.RST_STREAM, 0, 1)
        client.writer.close()
        assert all(each.kind in HOUSEKEEPING for each in await server.end()), "it had ended"

    run(work)


def test_an_end_within_a_message_is_passed_on_without_the_error() -> None:
    async def work(setting: FrameSetting) -> None:
        client = await setting.connect()
        client.send(call(1, STREAM, GOOD, ends=False))
        server = await setting.server()
        server.send(headers(1, ANSWER_HEAD), data(1, framed(b"12345")[:7]))
        await client.fields(1)
        await data_of(client, 1, 7)
        client.send(data(1, framed(BAD)))
        await pinged(client)
        server.send(headers(1, OK, ends=True))
        assert (await client.status(1))[0] == 0

    run(work)


async def one_that_waits_without_a_server(setting: FrameSetting) -> Wire:
    """A client whose stream 1 has been answered; 15 bytes and the end wait for it, and the server is gone."""
    client = await setting.connect({http2.INITIAL_WINDOW_SIZE: 20})
    client.send(call(1, STREAM, GOOD, ends=False))
    server = await setting.server()
    await server.frame(http2.HEADERS)
    client.send(http2.settings({http2.INITIAL_WINDOW_SIZE: 5}))
    await pinged(client)
    server.send(headers(1, ANSWER_HEAD), data(1, framed(bytes(15))), headers(1, OK, ends=True))
    await client.fields(1)
    await data_of(client, 1, 5)
    server.writer.close()
    (connection,) = setting.door._connections
    while connection._calls._upstream is not None:
        await asyncio.sleep(0)
    return client


def test_an_answer_that_waits_is_not_lost_with_the_server() -> None:
    async def work(setting: FrameSetting) -> None:
        client = await one_that_waits_without_a_server(setting)
        client.send(http2.window_update(1, 100))
        await data_of(client, 1, 15)
        assert (await client.status(1))[0] == 0

    run(work)


def test_a_call_after_the_servers_return_is_not_reset_with_one_from_before() -> None:
    """To the server both are stream 1, each of its own connection."""

    async def work(setting: FrameSetting) -> None:
        client = await one_that_waits_without_a_server(setting)
        client.send(call(3, STREAM, GOOD, ends=False))
        server = await setting.server()
        assert [(await server.frame()).stream_id for _ in range(2)] == [1, 1]
        client.send(http2.rst_stream(1, http2.CANCEL))
        await pinged(client)
        server.send(headers(1, ANSWER_HEAD), data(1, framed(b"")), headers(1, OK, ends=True))
        await client.fields(3)
        await data_of(client, 3, PREFIX.size)
        assert (await client.status(3))[0] == 0

    run(work)


def test_a_call_after_the_servers_return_is_granted_nothing_of_one_from_before() -> None:
    async def work(setting: FrameSetting) -> None:
        client = await one_that_waits_without_a_server(setting)
        client.send(call(3, STREAM, GOOD, ends=False))
        server = await setting.server()
        await server.frame(http2.DATA)
        client.send(http2.window_update(1, 100))
        await data_of(client, 1, 15)
        await client.status(1)
        assert 1 not in await granted_to(server)
        client.send(http2.window_update(3, 3))
        await pinged(client)
        assert (await granted_to(server))[1] == 3

    run(work)


def test_windows_are_checked_before_anything_is_sent() -> None:
    async def work(setting: FrameSetting) -> None:
        client = await setting.connect({http2.INITIAL_WINDOW_SIZE: 0})
        client.send(call(1, STREAM, BAD, ends=False), headers(3, head_fields(STREAM)))
        client.send(http2.window_update(3, http2.MAX_WINDOW))
        await pinged(client)
        client.send(http2.settings({http2.INITIAL_WINDOW_SIZE: 1000}))
        rest = [each for each in await client.end() if each.kind != http2.WINDOW_UPDATE]
        assert [each.kind for each in rest] == [http2.GOAWAY]
        assert int.from_bytes(rest[0].payload[4:8], "big") == http2.FLOW_CONTROL_ERROR

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
        assert "triton_x" in error_in((await client.frame()).payload)
        assert (await client.frame()).payload == framed(b"next")
        assert (await server.frame()).payload == framed(GOOD), "the message behind it passes"

    run(work)


@pytest.mark.parametrize("sends_head", [True, False])
def test_an_error_before_the_servers_head_needs_a_head(sends_head: bool) -> None:
    async def work(setting: FrameSetting) -> None:
        client = await setting.connect()
        client.send(call(1, STREAM, BAD))
        assert (await client.fields(1))[":status"] == "200"
        assert "triton_x" in error_in((await client.frame()).payload)
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
