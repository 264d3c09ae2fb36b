"""Streams whose clients leave: the server may end them itself before they are reset."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from tritonclient.grpc import service_pb2

from helpers.http2_wire import (
    ANSWER_HEAD,
    GOOD,
    HOUSEKEEPING,
    INFER,
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
from naiad.gate import grpc_door, grpc_left_calls
from naiad.gate import http2_frames as http2
from naiad.gate.grpc_framing import framed
from naiad.gate.grpc_status import Status
from naiad.gate.limits import Limits

ERROR = framed(service_pb2.ModelStreamInferResponse(error_message="no such model").SerializeToString())
GOOD_ANSWER = framed(
    service_pb2.ModelStreamInferResponse(
        infer_response=service_pb2.ModelInferResponse(model_name="m")
    ).SerializeToString()
)
RESET = http2.rst_stream(1, http2.CANCEL)
TRAILERS = headers(1, OK, ends=True)
FEW_S = 0.05


@pytest.fixture(autouse=True)
def _short_graces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_left_calls, "_GRACE_S", FEW_S)
    monkeypatch.setattr(grpc_left_calls, "_UNANSWERED_GRACE_S", 4 * FEW_S)


async def asked(setting: FrameSetting, settings: dict[int, int] | None = None) -> tuple[Wire, Wire]:
    """A client and the server, which has got the first message of the client's stream."""
    client = await setting.connect(settings)
    client.send(call(1, STREAM, GOOD, ends=False))
    server = await setting.server()
    await server.frame(http2.DATA)
    return client, server


async def wait_for(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


async def is_half_closed(server: Wire) -> None:
    each = await server.frame()
    assert each[:] == (http2.DATA, http2.END_STREAM, 1, b"")


async def is_reset(server: Wire) -> None:
    assert (await server.frame())[:] == (http2.RST_STREAM, 0, 1, http2.CANCEL.to_bytes(4, "big"))


async def stays(server: Wire) -> None:
    """The stream is not reset for some times its grace."""
    await asyncio.sleep(8 * FEW_S)
    server.send(PING)
    while (each := await server.any_frame()).kind != http2.PING:
        assert each.kind in HOUSEKEEPING, each


@pytest.mark.parametrize("parts", [1, len(ERROR)])
@pytest.mark.parametrize("is_late", [False, True])
def test_a_stream_that_began_with_an_error_is_left_to_the_server(is_late: bool, parts: int) -> None:
    async def work(setting: FrameSetting) -> None:
        client, server = await asked(setting)
        step = len(ERROR) // parts
        answer = [data(1, ERROR[at : at + step]) for at in range(0, len(ERROR), step)]
        if not is_late:
            server.send(headers(1, ANSWER_HEAD), *answer)
            await client.frame(http2.DATA)
        client.send(RESET)
        await is_half_closed(server)
        if is_late:
            server.send(headers(1, ANSWER_HEAD), *answer)
        await stays(server)
        # Other requests of the stream still run.
        server.send(data(1, GOOD_ANSWER))
        await stays(server)
        server.send(TRAILERS)
        await stays(server)

    run(work)


@pytest.mark.parametrize("is_answered", [False, True])
def test_a_stream_that_goes_on_is_reset(is_answered: bool) -> None:
    async def work(setting: FrameSetting) -> None:
        client, server = await asked(setting)
        if is_answered:
            server.send(headers(1, ANSWER_HEAD), data(1, GOOD_ANSWER), data(1, ERROR))
            await client.frame(http2.DATA)
        client.send(RESET)
        await is_half_closed(server)
        await is_reset(server)

    run(work)


def test_a_stream_without_a_message_is_reset_at_once() -> None:
    async def work(setting: FrameSetting) -> None:
        client = await setting.connect()
        client.send(headers(1, head_fields(STREAM)), data(1, framed(GOOD)[:7]))
        server = await setting.server()
        await server.frame(http2.HEADERS)
        client.send(RESET)
        await is_reset(server)

    run(work)


def test_a_stream_whose_client_has_ended_it_is_not_ended_again() -> None:
    async def work(setting: FrameSetting) -> None:
        client, server = await asked(setting)
        client.send(data(1, b"", ends=True))
        assert (await server.frame()).flags & http2.END_STREAM
        client.send(RESET)
        await is_reset(server)

    run(work)


@pytest.mark.parametrize("has_error", [False, True])
def test_the_connection_outlives_its_client_until_its_streams_are_over(has_error: bool) -> None:
    async def work(setting: FrameSetting) -> None:
        client, server = await asked(setting)
        if has_error:
            server.send(headers(1, ANSWER_HEAD), data(1, ERROR))
            await client.frame(http2.DATA)
        client.writer.transport.abort()
        await is_half_closed(server)
        if has_error:
            await stays(server)
            server.send(TRAILERS)
        else:
            await is_reset(server)
        assert [each for each in await server.end() if each.kind not in HOUSEKEEPING] == []

    run(work)


@pytest.mark.parametrize("leaves", [False, True])
def test_the_error_of_a_client_that_takes_nothing_has_room(leaves: bool) -> None:
    async def work(setting: FrameSetting) -> None:
        client, server = await asked(setting, {http2.INITIAL_WINDOW_SIZE: 0})
        if leaves:
            client.writer.transport.abort()
        else:
            client.send(RESET)
        await is_half_closed(server)
        update = await server.frame(http2.WINDOW_UPDATE)
        assert update[2:] == (1, grpc_left_calls.ROOM_BYTES.to_bytes(4, "big"))
        server.send(headers(1, ANSWER_HEAD), data(1, ERROR))
        await stays(server)
        server.send(TRAILERS)
        if leaves:
            await server.end()
        else:
            client.send(call(3, STREAM, GOOD))
            assert (await request_of(server))[2] == 3

    run(work)


def test_an_error_that_waits_for_the_client_is_seen() -> None:
    async def work(setting: FrameSetting) -> None:
        client, server = await asked(setting, {http2.INITIAL_WINDOW_SIZE: 3})
        # More than the client takes, as of a server that was told of a larger window.
        server.send(headers(1, ANSWER_HEAD), data(1, ERROR))
        assert len((await client.frame(http2.DATA)).payload) == 3
        client.send(RESET)
        await is_half_closed(server)
        await stays(server)
        server.send(TRAILERS)

    run(work)


def test_a_server_that_is_gone_ends_what_was_left_to_it() -> None:
    async def work(setting: FrameSetting) -> None:
        client, server = await asked(setting)
        client.send(RESET)
        await is_half_closed(server)
        server.writer.close()
        await asyncio.sleep(8 * FEW_S)
        client.send(call(3, STREAM, GOOD))
        assert (await request_of(await setting.server()))[2] == 1

    run(work)


def test_the_deadline_of_a_stream_is_the_gates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_door, "_LOOK_S", 0.02)

    async def work(setting: FrameSetting) -> None:
        client = await setting.connect()
        client.send(headers(1, head_fields(STREAM, (b"grpc-timeout", b"300m"))), data(1, framed(GOOD)))
        server = await setting.server()
        fields = server.decoded(await server.frame(http2.HEADERS))
        assert "grpc-timeout" not in fields
        await server.frame(http2.DATA)
        status, text = await client.status(1)
        assert (status, "deadline" in text) == (Status.DEADLINE_EXCEEDED, True)
        await is_half_closed(server)
        await is_reset(server)

    run(work)


def test_the_deadline_of_a_unary_call_is_sent_on() -> None:
    async def work(setting: FrameSetting) -> None:
        client = await setting.connect()
        client.send(
            headers(1, head_fields(INFER, (b"grpc-timeout", b"3S"))), data(1, framed(GOOD), ends=True)
        )
        fields, _, _ = await request_of(await setting.server())
        assert ("grpc-timeout", "3S") in fields

    run(work)


@pytest.mark.parametrize("is_before", [False, True])
def test_a_client_that_makes_its_window_smaller_as_it_leaves_takes_no_room_away(is_before: bool) -> None:
    async def work(setting: FrameSetting) -> None:
        client, server = await asked(setting)
        smaller = http2.settings({http2.INITIAL_WINDOW_SIZE: 0})
        client.send(smaller + RESET if is_before else RESET + smaller)
        # What the server may send of the stream.
        window, has_ended = http2.DEFAULT_WINDOW, False
        while window < grpc_left_calls.ROOM_BYTES or not has_ended or window == http2.DEFAULT_WINDOW:
            each = await server.any_frame()
            if each.kind == http2.SETTINGS and not each.flags & http2.ACK and each.payload:
                window -= http2.DEFAULT_WINDOW - int.from_bytes(each.payload[2:6], "big")
            elif each.kind == http2.WINDOW_UPDATE and each.stream_id == 1:
                window += int.from_bytes(each.payload, "big")
            elif each.kind == http2.DATA:
                has_ended = True
        assert window == grpc_left_calls.ROOM_BYTES
        server.send(headers(1, ANSWER_HEAD), data(1, ERROR))
        await stays(server)
        server.send(TRAILERS)

    run(work)


def test_a_call_that_is_left_counts_until_it_is_over_but_its_request_is_dropped() -> None:
    async def work(setting: FrameSetting) -> None:
        client, server = await asked(setting)
        server.send(headers(1, ANSWER_HEAD), data(1, ERROR))
        await client.frame(http2.DATA)
        client.send(http2.data_frames(1, framed(bytes(50_000))[:40_000]))
        await wait_for(lambda: setting.door._num_held_bytes >= 40_000)
        (connection,) = setting.door._connections
        (left,) = connection._calls._open.values()
        client.writer.transport.abort()
        await is_half_closed(server)
        assert (setting.door._num_calls, setting.door._num_held_bytes, left.num_bytes) == (1, 0, 0)
        server.send(TRAILERS)
        await wait_for(lambda: setting.door._num_calls == 0)

    run(work)


def test_calls_that_are_left_take_the_place_of_others() -> None:
    async def work(setting: FrameSetting) -> None:
        client, server = await asked(setting)
        server.send(headers(1, ANSWER_HEAD), data(1, ERROR))
        await client.frame(http2.DATA)
        client.send(RESET, call(3, STREAM, GOOD))
        status, text = await client.status(3)
        assert (status, "at most 1 calls" in text) == (Status.RESOURCE_EXHAUSTED, True)
        server.send(TRAILERS)
        await wait_for(lambda: setting.door._num_calls == 0)
        client.send(call(5, STREAM, GOOD))
        await is_half_closed(server)
        assert (await request_of(server))[2] == 3

    run(work, Limits(max_connections=1))


def test_an_error_that_another_call_has_taken_the_room_of_is_waited_for() -> None:
    async def work(setting: FrameSetting) -> None:
        client = await setting.connect()
        client.send(call(1, STREAM, GOOD, ends=False), call(3, STREAM, GOOD, ends=False))
        server = await setting.server()
        assert [(await server.frame()).kind for _ in range(4)] == [http2.HEADERS, http2.DATA] * 2
        client.send(http2.rst_stream(3, http2.CANCEL))
        assert (await server.frame())[:3] == (http2.DATA, http2.END_STREAM, 3)
        # The other one's answer takes the whole window of the connection.
        server.send(headers(1, ANSWER_HEAD))
        for _ in range(4):
            server.send(data(1, bytes(http2.DEFAULT_WINDOW // 4)))
        update = await server.frame(http2.WINDOW_UPDATE, http2.RST_STREAM)
        assert update[:3] == (http2.WINDOW_UPDATE, 0, 0), "it was reset before it had room"
        server.send(headers(3, ANSWER_HEAD), data(3, ERROR))
        await stays(server)
        server.send(headers(3, OK, ends=True))

    run(work)


def test_a_call_that_waits_for_room_begins_when_one_that_was_left_is_over() -> None:
    async def work(setting: FrameSetting) -> None:
        client = await setting.connect()
        client.send(call(1, STREAM, GOOD, ends=False))
        server = await setting.server({http2.MAX_CONCURRENT_STREAMS: 1})
        await server.frame(http2.DATA)
        client.send(RESET, call(3, STREAM, GOOD))
        await is_half_closed(server)
        frames = {(await server.frame())[:3] for _ in range(2)}
        assert frames == {(http2.RST_STREAM, 0, 1), (http2.HEADERS, http2.END_HEADERS, 3)}

    run(work)
