"""What gRPC requests may cost while they wait: memory, turns of the event loop, and room for calls."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
from collections import Counter
from collections.abc import AsyncIterator

import pytest
from tritonclient.grpc import service_pb2

from helpers.http2_wire import (
    ANSWER_HEAD,
    GOOD,
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
    run,
)
from naiad.gate import grpc_requests
from naiad.gate import http2_frames as http2
from naiad.gate.grpc_framing import PREFIX, framed
from naiad.gate.grpc_requests import MAX_WAITING_BYTES
from naiad.gate.grpc_status import Status
from naiad.gate.limits import Limits

GZIP = (b"grpc-encoding", b"gzip")
LARGE = service_pb2.ModelInferRequest(raw_input_contents=[bytes(1 << 20)]).SerializeToString()


def packed(message: bytes) -> bytes:
    """A compressed message as it stands in a request."""
    content = gzip.compress(message)
    return PREFIX.pack(1, len(content)) + content


async def stopped_server(setting: FrameSetting) -> Wire:
    """A server that takes nothing of requests."""
    server = await setting.server({http2.INITIAL_WINDOW_SIZE: 0})
    while not (await server.frame(http2.SETTINGS)).flags & http2.ACK:
        pass
    return server


@contextlib.asynccontextmanager
async def counted_turns(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Counter[int]]:
    """How many messages each turn of the event loop checks."""
    turn, num_checked, check = 0, Counter[int](), grpc_requests.check_infer_request

    async def count() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    def counted(raw: bytes, limits: Limits) -> None:
        num_checked[turn] += 1
        check(raw, limits)

    monkeypatch.setattr(grpc_requests, "check_infer_request", counted)
    counting = asyncio.create_task(count())
    try:
        yield num_checked
    finally:
        counting.cancel()


def test_a_message_stays_compressed_until_its_request_has_ended() -> None:
    sent = packed(LARGE)
    streams = range(1, 65, 2)

    async def work(setting: FrameSetting) -> None:
        client = await setting.connect()
        client.send(*(headers(n, head_fields(INFER, GZIP)) + data(n, sent) for n in streams), PING)
        await client.frame(http2.PING)
        assert setting.door._num_held_bytes == len(streams) * (len(sent) - PREFIX.size)
        client.send(http2.frame(http2.DATA, http2.END_STREAM, 1))
        server = await setting.server({http2.INITIAL_WINDOW_SIZE: 2 << 20})
        server.send(http2.window_update(0, 2 << 20))
        received = b""
        while len(received) < len(LARGE) + PREFIX.size:
            received += (await server.frame(http2.DATA)).payload
        assert received == framed(LARGE)

    run(work)


def test_no_further_message_is_inflated_while_one_waits_for_the_server() -> None:
    sent = packed(LARGE)

    async def work(setting: FrameSetting) -> None:
        client = await setting.connect()
        client.send(headers(1, head_fields(STREAM, GZIP)))
        server = await stopped_server(setting)
        client.send(data(1, sent * 8, ends=True))
        while setting.door._num_held_bytes < len(LARGE):
            await asyncio.sleep(0)
        client.send(PING)
        await client.frame(http2.PING)
        assert setting.door._num_held_bytes == len(framed(LARGE)) + 7 * len(sent)
        expected, received = framed(LARGE) * 8, b""
        server.send(http2.window_update(0, 16 << 20), http2.window_update(1, 16 << 20))
        while len(received) < len(expected):
            received += (await server.frame(http2.DATA)).payload
            assert setting.door._num_held_bytes <= len(framed(LARGE)) + MAX_WAITING_BYTES + 7 * len(sent)
        assert received == expected

    run(work)


def test_requests_that_came_compressed_have_a_limit_of_their_own() -> None:
    async def work(setting: FrameSetting) -> None:
        client = await setting.connect()
        client.send(headers(1, head_fields(STREAM)))
        await stopped_server(setting)
        client.send(headers(3, head_fields(INFER, GZIP)), data(3, packed(LARGE), ends=True))
        client.send(headers(5, head_fields(INFER, GZIP)), data(5, packed(LARGE), ends=True))
        status, text = await client.status(5)
        assert (status, "large requests" in text) == (Status.RESOURCE_EXHAUSTED, True)
        assert setting.door._num_inflated_bytes == len(framed(LARGE))
        large = service_pb2.ModelInferRequest(raw_input_contents=[bytes(100_000)]).SerializeToString()
        sent = framed(large)
        client.send(*(data(1, sent[at : at + 16_000]) for at in range(0, len(sent), 16_000)), PING)
        await client.frame(http2.PING)
        assert setting.door._num_held_bytes == len(framed(LARGE)) + len(sent)

    run(work, Limits(max_inflated_bytes=len(LARGE) * 3 // 2))


@pytest.mark.parametrize(("is_compressed", "most"), [(False, 256), (True, 1)])
def test_a_turn_of_the_loop_checks_so_many_messages_at_most(
    is_compressed: bool, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = packed(GOOD) if is_compressed else framed(GOOD)
    num_messages = 12_000 // len(message)
    assert num_messages > most

    async def work(setting: FrameSetting) -> None:
        client = await setting.connect()
        client.send(headers(1, head_fields(STREAM, GZIP)))
        server = await setting.server()
        async with counted_turns(monkeypatch) as num_checked:
            client.send(data(1, message * num_messages, ends=True))
            received = b""
            while len(received) < num_messages * len(framed(GOOD)):
                received += (await server.frame(http2.DATA)).payload
            assert received == framed(GOOD) * num_messages
            assert max(num_checked.values()) <= most
            assert num_checked.total() == num_messages
        server.send(headers(1, (*ANSWER_HEAD, *OK), ends=True))
        assert (await client.status(1))[0] == 0

    run(work)


def test_requests_of_many_calls_share_the_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = range(1, 41, 2)

    async def work(setting: FrameSetting) -> None:
        client = await setting.connect()
        async with counted_turns(monkeypatch) as num_checked:
            client.send(*(headers(n, head_fields(INFER, GZIP)) for n in streams))
            client.send(*(data(n, packed(GOOD), ends=True) for n in streams))
            server = await setting.server()
            for _ in streams:
                await server.frame(http2.DATA)
            assert (max(num_checked.values()), num_checked.total()) == (1, len(streams))

    run(work)


def test_calls_that_bring_nothing_make_room_when_nearly_none_is_left() -> None:
    limits = Limits(max_connections=8)

    async def work(setting: FrameSetting) -> None:
        door, now_s = setting.door, asyncio.get_running_loop().time
        client = await setting.connect()
        client.send(call(1, STREAM, GOOD, ends=False), call(3, STREAM, GOOD, ends=False))
        client.send(headers(5, head_fields(STREAM)) + data(5, framed(GOOD)[:3]))
        client.send(headers(7, head_fields(STREAM)), headers(9, head_fields(STREAM)))
        client.send(headers(11, head_fields(INFER)), headers(13, head_fields(INFER)) + data(13, b"\0"), PING)
        await client.frame(http2.PING)
        server = await setting.server()
        server.send(headers(1, ANSWER_HEAD), data(1, framed(b"an answer")))
        await client.fields(1)
        await client.frame(http2.DATA)
        door._make_room(now_s() + 1e6)
        assert door._num_calls == 7, "there is room"

        (connection,) = door._connections
        ended = []
        for new, wait_s in ((15, 9.0), (0, 11.0), (17, 11.0), (19, 11.0), (21, 61.0)):
            if new:
                client.send(call(new, STREAM, GOOD, ends=False), PING)
                await client.frame(http2.PING)
                connection.look(now_s())
            num_before = len(connection._calls)
            door._make_room(now_s() + wait_s)
            if len(connection._calls) < num_before:
                each = await client.frame(http2.HEADERS)
                assert client.decoded(each)["grpc-status"] == str(int(Status.RESOURCE_EXHAUSTED))
                ended.append(each.stream_id)
        # Those that brought nothing, the oldest first; then the one whose message was answered.
        assert ended == [7, 9, 11, 1]
        # The server has the time to end that one by itself.
        assert (len(connection._calls), door._num_calls) == (7, 8)
        while door._num_calls == 8:
            await asyncio.sleep(0.01)
        client.send(call(23, STREAM, GOOD, ends=False), PING)
        await client.frame(http2.PING)
        door._make_room(now_s() + 1e6)
        assert door._num_calls == 8, "a message comes, or an answer is owed"

    run(work, limits)
