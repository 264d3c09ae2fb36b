"""Streams whose clients leave: the server may end them itself before they are reset."""

from __future__ import annotations

import asyncio

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
