"""Heads and bodies of gRPC requests: which calls the gate passes on, and which it refuses."""

from __future__ import annotations

import gzip

import pytest

from helpers.http2_wire import (
    BAD,
    GOOD,
    INFER,
    LIVE,
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
from naiad.gate import grpc_door
from naiad.gate import http2_frames as http2
from naiad.gate.grpc_framing import PREFIX, framed
from naiad.gate.grpc_status import Status
from naiad.gate.limits import Limits


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


def test_metadata_that_comes_twice_is_a_list_or_does_not_count() -> None:
    trace = (b"traceparent", b"00-" + b"1" * 32 + b"-" + b"2" * 16 + b"-01")
    states = ((b"tracestate", b"a=1"), (b"tracestate", b"b=2"))

    async def work(setting: FrameSetting) -> None:
        client = await setting.connect()
        for number, sent in ((1, (trace, *states)), (3, (*states, trace, trace))):
            client.send(headers(number, head_fields(INFER, *sent)), data(number, framed(GOOD), ends=True))
        server = await setting.server()
        known = [name.decode() for name, _ in (trace, *states)]
        passed = [[each for each in (await request_of(server))[0] if each[0] in known] for _ in range(2)]
        assert passed[0] == [("traceparent", trace[1].decode()), ("tracestate", "a=1,b=2")]
        assert passed[1] == [("tracestate", "a=1,b=2")]

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
