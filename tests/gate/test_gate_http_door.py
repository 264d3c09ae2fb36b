"""What passes the gate's HTTP door, and what becomes of those who send too much or take too long."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest

from helpers.gate_doors import (
    GENERATE,
    LAST_CHUNK,
    PATIENCE_S,
    STREAM,
    STREAM_HEAD,
    Setting,
    a_door,
    chunk,
    get,
    post,
    status_of,
)
from naiad.gate.limits import Limits

TRACE = f"00-{1:032x}-{2:016x}-01"
BODY = b'{"text_input": "a", "max_tokens": 3}'
OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"


def run(
    work: Callable[[Setting], Awaitable[None]], limits: Limits | None = None, *, server: bool = True
) -> None:
    async def inside() -> None:
        async with a_door(limits, server_is_there=server) as setting:
            await asyncio.wait_for(work(setting), PATIENCE_S)

    asyncio.run(inside())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def refused(raw: bytes, limits: Limits | None = None) -> tuple[int, str]:
    """Status and message of a request that does not reach the server."""
    found: list[tuple[int, str]] = []

    async def work(setting: Setting) -> None:
        answer = await setting.exchange(raw)
        assert (setting.server.requests, b"Connection: close" in answer) == ([], True)
        found.append((status_of(answer), json.loads(answer.split(b"\r\n\r\n", 1)[1])["error"]))

    run(work, limits)
    return found[0]


def test_the_server_gets_the_request_written_anew() -> None:
    async def work(setting: Setting) -> None:
        reader, writer = await setting.connect()
        headers = (
            "X-Secret: 1",
            "tracestate: \xff",
            "Accept-Encoding: gzip",
            f"traceparent: {TRACE}",
            "Connection: keep-alive",
        )
        writer.write(post(GENERATE, b' {"a" : 1, "a": 2}', *headers))
        await until(lambda: bool(setting.server.requests))
        host = setting.door.server_address.encode()
        expected = b"POST " + GENERATE.encode() + b" HTTP/1.1\r\nHost: " + host
        expected += (
            b"\r\nContent-Type: application/json\r\nContent-Length: 7\r\ntraceparent: "
            + TRACE.encode()
            + b"\r\n\r\n"
        )
        assert setting.server.requests == [expected + b'{"a":2}']
        setting.server.to_send.put_nowait(OK)
        assert await reader.readexactly(len(OK)) == OK
        writer.close()

    run(work)


PARENT, STATE = f"traceparent: {TRACE}", "tracestate: a=1,b=2"
KEY = "naiad-model-control-key: " + "k" * 16


@pytest.mark.parametrize(
    ("sent", "passed"),
    [
        ((PARENT, STATE, "TraceState: c=3"), [PARENT, "tracestate: a=1,b=2,c=3"]),
        ((PARENT, STATE, PARENT), [STATE]),
        ((KEY, PARENT, KEY), [PARENT]),
    ],
    ids=["tracestate", "traceparent", "key"],
)
def test_a_header_that_comes_twice_is_a_list_or_does_not_count(
    sent: tuple[str, ...], passed: list[str]
) -> None:
    async def work(setting: Setting) -> None:
        _, writer = await setting.connect()
        writer.write(get("/v2", *sent))
        await until(lambda: bool(setting.server.requests))
        _, host, *lines = setting.server.requests[0].decode().split("\r\n")
        assert host == f"Host: {setting.door.server_address}"
        assert lines == [*passed, "", ""]
        writer.close()

    run(work)


def test_one_connection_has_many_requests_in_order() -> None:
    async def work(setting: Setting) -> None:
        reader, writer = await setting.connect()
        writer.write(get("/v2/health/live") + post(GENERATE, BODY) + get("/v2"))
        for number in range(1, 4):
            await until(lambda number=number: len(setting.server.requests) == number)
            setting.server.to_send.put_nowait(OK)
            assert await reader.readexactly(len(OK)) == OK
        assert setting.server.num_connections == 1
        writer.close()

    run(work)


def test_a_stream_passes_as_it_comes() -> None:
    async def work(setting: Setting) -> None:
        reader, writer = await setting.connect()
        writer.write(post(STREAM, BODY))
        setting.server.to_send.put_nowait(STREAM_HEAD)
        assert await reader.readexactly(len(STREAM_HEAD)) == STREAM_HEAD
        for number in range(3):
            piece = chunk(b"data: %d\n\n" % number)
            setting.server.to_send.put_nowait(piece)
            assert await reader.readexactly(len(piece)) == piece
        for part in (LAST_CHUNK[:2], LAST_CHUNK[2:]):
            setting.server.to_send.put_nowait(part)
            assert await reader.readexactly(len(part)) == part
        writer.write(get("/v2", "Connection: close"))
        setting.server.to_send.put_nowait(OK)
        assert b"Connection: close" in await reader.read()
        writer.close()

    run(work)


def test_a_client_that_goes_ends_its_request() -> None:
    async def work(setting: Setting) -> None:
        reader, writer = await setting.connect()
        writer.write(post(STREAM, BODY))
        setting.server.to_send.put_nowait(STREAM_HEAD)
        await reader.readexactly(len(STREAM_HEAD))
        writer.close()
        await setting.server.lost.wait()

    run(work)


def test_an_answer_that_breaks_off_is_not_taken_for_a_whole_one() -> None:
    async def work(setting: Setting) -> None:
        reader, writer = await setting.connect()
        writer.write(post(STREAM, BODY))
        setting.server.to_send.put_nowait(STREAM_HEAD + chunk(b"data: 1\n\n"))
        await reader.readuntil(b"data: 1\n\n\r\n")
        setting.server.to_send.put_nowait(None)
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await reader.readexactly(1)
        writer.close()

    run(work)


def test_a_server_that_is_away_is_told() -> None:
    async def work(setting: Setting) -> None:
        answer = await setting.exchange(get("/v2/health/ready"))
        assert status_of(answer) == 503
        assert b"Retry-After" in answer

    run(work, server=False)


def test_a_server_that_closes_without_an_answer_is_told() -> None:
    async def work(setting: Setting) -> None:
        setting.server.to_send.put_nowait(None)
        assert status_of(await setting.exchange(get("/v2/health/ready"))) == 503

    run(work)


def test_chunks_reach_the_server_as_one_body() -> None:
    async def work(setting: Setting) -> None:
        _, writer = await setting.connect()
        head = (
            f"POST {GENERATE} HTTP/1.1\r\nHost: 127.0.0.1:8000\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
        )
        for byte in head + b"".join(chunk(BODY[at : at + 5]) for at in range(0, len(BODY), 5)) + LAST_CHUNK:
            writer.write(bytes([byte]))
            await writer.drain()
        await until(lambda: bool(setting.server.requests))
        assert setting.server.requests[0].endswith(b'{"text_input":"a","max_tokens":3}')
        writer.close()

    run(work)


CHUNKED = f"POST {GENERATE} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n".encode()


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (CHUNKED + b"\r\n" + chunk(b"[") * 600_000 + LAST_CHUNK, 413),
        (CHUNKED + b"\r\n" + b"ffffff\r\n", 413),
        (CHUNKED + b"\r\n" + b"1;a=b\r\nx\r\n0\r\n\r\n", 400),
        (CHUNKED + b"\r\n" + b"1\r\nxy\r\n", 400),
        (CHUNKED + b"\r\n" + b"-1\r\n", 400),
        (CHUNKED + b"\r\n" + b"0\r\nTrailer: 1\r\n\r\n", 400),
        (CHUNKED + b"Content-Length: 3\r\n\r\n", 400),
        (CHUNKED.replace(b"chunked", b"gzip, chunked") + b"\r\n", 501),
        (post(GENERATE, b"[" * 50_000 + b"]" * 50_000), 400),
        (post(GENERATE, b'{"a":' * 50_000 + b"1" + b"}" * 50_000), 400),
        (post(GENERATE, b'{"a":' * 33 + b"1" + b"}" * 33), 400),
        (post(GENERATE, b'{"a": NaN}'), 400),
        (post(GENERATE, b'{"a": "\xff"}'), 400),
        (post(GENERATE, b'{"a": "\\ud800"}'), 400),
        (post(GENERATE, b"[1]"), 400),
        (post(GENERATE, b"{}", "Content-Encoding: gzip"), 415),
        (post(GENERATE, b"{}", "Content-Length: 2"), 400),
        (post(GENERATE, b"{}", "Origin: https://evil.example"), 403),
        (post(GENERATE, b"{}", "Expect: the unexpected"), 417),
        (post(GENERATE, b"{}").replace(b"localhost", b"evil.example"), 403),
        (post(GENERATE, b"{}").replace(b"Host: localhost\r\n", b""), 400),
        (post(GENERATE, b"{}").replace(b"Length: 2", b"Length: +2"), 400),
        (post(GENERATE, b"{}").replace(b"Length: 2", b"Length: 4194305"), 413),
        (post(GENERATE, b"{}", "X: " + "a" * 20_000), 431),
        (post(GENERATE, b"{}", *(f"X-{n}: 1" for n in range(70))), 431),
        (post(GENERATE, b"{}", "A : 1"), 400),
        (post(GENERATE, b"{}", " folded: 1"), 400),
        (post(GENERATE, b"{}", "A: 1\nB: 2"), 400),
        (post(GENERATE, b"{}", "A: \0"), 400),
        (post("/v2/models/m/infer", b"{}", "Inference-Header-Content-Length: \xb2"), 400),
        (post("/v2/models/m/infer", b"{}", "Inference-Header-Content-Length: 3"), 400),
        (post("/v2/models/m/infer", b"raw", "Inference-Header-Content-Length: 0"), 400),
        (get("/v2", "Content-Length: 1") + b"x", 400),
        (b"GET  /v2 HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"GET http://localhost/v2 HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
        (b"GET /v2 HTTP/2.0\r\nHost: localhost\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (post(STREAM, b"{}").replace(b"HTTP/1.1", b"HTTP/1.0"), 505),
        (post(GENERATE, b"{}").replace(b"HTTP/1.1", b"HTTP/1.0"), 505),
        (post(GENERATE, b""), 400),
        (post(STREAM, b"  "), 400),
        (b"\x16\x03\x01" + b"\r\n\r\n", 400),
    ],
)
def test_what_does_not_pass(raw: bytes, status: int) -> None:
    assert refused(raw)[0] == status


@pytest.mark.parametrize("length", ["0", "000"])
def test_a_raw_binary_request_is_refused_by_name(length: str) -> None:
    request = post("/v2/models/m/infer", b"raw", f"Inference-Header-Content-Length: {length}")
    status, message = refused(request)
    assert status == 400
    assert message.startswith("Inference-Header-Content-Length = 0: expected the length of the JSON")
    assert "raw binary requests do not pass" in message


@pytest.mark.parametrize("host", ["localhost:8000", "127.0.0.1", "[::1]:8000", "Known.Example:80"])
def test_hosts_and_origins_that_pass(host: str) -> None:
    async def work(setting: Setting) -> None:
        _, writer = await setting.connect()
        writer.write(get("/v2", "Origin: https://known.example").replace(b"localhost", host.encode()))
        await until(lambda: bool(setting.server.requests))
        writer.close()

    run(work)


def test_a_client_that_asks_before_it_sends_its_body_is_told_to() -> None:
    async def work(setting: Setting) -> None:
        reader, writer = await setting.connect()
        writer.write(post(GENERATE, BODY, "Expect: 100-continue")[: -len(BODY)])
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(BODY)
        await until(lambda: bool(setting.server.requests))
        writer.close()

    run(work)


@pytest.mark.parametrize("sent", [b"", b"POST " + GENERATE.encode(), post(GENERATE, BODY)[:-1]])
def test_who_sends_too_slowly_is_refused(sent: bytes) -> None:
    status, message = refused(sent, Limits(head_s=0.1, body_s=0.1))
    assert status == 408
    assert "did not come" in message


def test_a_connection_without_requests_is_closed() -> None:
    async def work(setting: Setting) -> None:
        reader, writer = await setting.connect()
        writer.write(get("/v2"))
        setting.server.to_send.put_nowait(OK)
        assert await reader.read() == OK
        writer.close()

    run(work, Limits(idle_s=0.1))


def test_connections_beyond_the_limit_are_refused_and_the_others_stay() -> None:
    async def work(setting: Setting) -> None:
        reader, writer = await setting.connect()
        writer.write(get("/v2")[:10])
        await until(lambda: len(setting.door._connections) == 1)
        assert status_of(await setting.exchange(b"")) == 503
        writer.write(get("/v2")[10:])
        setting.server.to_send.put_nowait(OK)
        assert await reader.readexactly(len(OK)) == OK
        writer.close()

    run(work, Limits(max_connections=1))


def test_bodies_of_all_connections_together_have_a_limit() -> None:
    async def work(setting: Setting) -> None:
        _, writer = await setting.connect()
        writer.write(post(GENERATE, b" " * 900)[:-1])
        await until(lambda: setting.door._num_held_bytes > 0)
        assert status_of(await setting.exchange(post(GENERATE, b" " * 900)[:-1])) == 503
        writer.close()
        await until(lambda: setting.door._num_held_bytes == 0)

    run(work, Limits(max_bodies_bytes=1000))


def test_a_client_that_reads_nothing_gives_up_its_request() -> None:
    async def work(setting: Setting) -> None:
        reader, writer = await setting.connect()
        writer.write(post(STREAM, BODY))
        setting.server.to_send.put_nowait(STREAM_HEAD)
        for _ in range(1000):
            setting.server.to_send.put_nowait(chunk(b"x" * 65_536))
        await setting.server.lost.wait()
        assert setting.door.num_slow_readers == 1
        assert not reader.at_eof()
        writer.close()

    run(work, Limits(slow_reader_s=0.2))


def test_a_client_that_reads_slowly_gets_everything() -> None:
    """More than its buffers hold comes at once."""
    parts = [chunk(bytes([65 + number % 26]) * 65_536) for number in range(160)]

    async def work(setting: Setting) -> None:
        reader, writer = await setting.connect()
        writer.write(post(STREAM, BODY, "Connection: close"))
        for part in (STREAM_HEAD, *parts, LAST_CHUNK):
            setting.server.to_send.put_nowait(part)
        await reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(0.5)
        assert await reader.read() == b"".join(parts) + LAST_CHUNK
        writer.close()

    run(work)


def test_requests_ahead_of_an_answer_have_a_limit() -> None:
    async def work(setting: Setting) -> None:
        _, writer = await setting.connect()
        writer.write(post(GENERATE, BODY) + get("/v2") * 2000)
        await setting.server.lost.wait()
        writer.close()

    run(work)


def test_a_door_that_closes_lets_answers_end() -> None:
    async def work(setting: Setting) -> None:
        reader, writer = await setting.connect()
        idle, idle_writer = await setting.connect()
        writer.write(post(STREAM, BODY))
        setting.server.to_send.put_nowait(STREAM_HEAD)
        await reader.readexactly(len(STREAM_HEAD))
        closing = asyncio.create_task(setting.door.close(PATIENCE_S))
        assert await idle.read() == b""
        setting.server.to_send.put_nowait(LAST_CHUNK)
        assert await reader.read() == LAST_CHUNK
        await closing
        for each in (writer, idle_writer):
            each.close()

    run(work)
