"""The windows of a gRPC connection through the gate: who may send how much, and what is granted again."""

from __future__ import annotations

import pytest
from tritonclient.grpc import service_pb2

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
    call,
    data,
    head_fields,
    headers,
    request_of,
    run,
)
from naiad.gate import http2_frames as http2
from naiad.gate.grpc_framing import PREFIX, framed


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
        assert (await server.frame())[:3] == (http2.DATA, http2.END_STREAM, 1)
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
