"""The guard and the reader of bodies behind a real port."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from aiohttp import ClientError, ClientSession, web

from naiad.openai_server.api.bodies import DetokenizeBody
from naiad.openai_server.body_reader import BodyReader
from naiad.openai_server.guard import Guard
from naiad.openai_server.route import Route, add_routes

ORIGIN = "https://chat.example.com"
BODY = json.dumps({"tokens": [1, 2]}).encode()
JSON = {"Content-Type": "application/json"}


@pytest.fixture
def app() -> Iterator[web.Application]:
    guard = Guard((), (ORIGIN,))
    pool = ThreadPoolExecutor(1)
    bodies = BodyReader(pool, is_lenient=False)

    async def handler(request: web.Request) -> web.Response:
        body = await bodies.read(request, DetokenizeBody)
        return web.json_response(body.tokens, headers={"Vary": "Accept-Encoding"})

    app = web.Application(middlewares=[guard.middleware])
    app.on_response_prepare.append(guard.prepare)
    add_routes(app, [Route(method="POST", path="/detokenize", handler=handler, summary="")])
    yield app
    pool.shutdown()


async def served(
    app: web.Application, auto_decompress: bool = False, lingering_time: float = 10
) -> tuple[web.AppRunner, str, int]:
    options: dict[str, Any] = {"auto_decompress": auto_decompress, "lingering_time": lingering_time}
    runner = web.AppRunner(app, access_log=None, **options)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0]
    return runner, host, port


def post(
    app: web.Application, body: bytes, path: str = "/detokenize", **headers: str
) -> tuple[int, dict[str, list[str]], bytes]:
    async def send() -> tuple[int, dict[str, list[str]], bytes]:
        runner, host, port = await served(app)
        sent = JSON | {name.replace("_", "-"): value for name, value in headers.items()}
        try:
            async with (
                ClientSession(skip_auto_headers=["Content-Type"]) as session,
                session.post(f"http://{host}:{port}{path}", data=body, headers=sent) as answer,
            ):
                found = {name: answer.headers.getall(name) for name in answer.headers}
                return answer.status, found, await answer.read()
        finally:
            await runner.cleanup()

    return asyncio.run(send())


def test_a_body_is_read(app: web.Application) -> None:
    assert post(app, BODY)[::2] == (200, b"[1, 2]")


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "GZIP", "gzip, gzip", "nonsense"])
def test_compressed_bodies_are_refused(app: web.Application, encoding: str) -> None:
    async def send() -> bytes:
        runner, host, port = await served(app)
        packed = gzip.compress(BODY)
        head = f"POST /detokenize HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        head += f"Content-Encoding: {encoding}\r\nContent-Length: {len(packed)}\r\nConnection: close\r\n\r\n"
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(head.encode() + packed)
        answer = await reader.read()
        writer.close()
        await runner.cleanup()
        return answer

    answer = asyncio.run(send())
    assert answer.startswith(b"HTTP/1.1 415 ")
    assert b"Content-Encoding = " in answer


@pytest.mark.parametrize("chunks", [b"zz\r\n", b"5\r\nab", b"5\r\nabcdefgh\r\n0\r\n\r\n"])
def test_a_body_that_breaks_off_is_no_failure_of_the_server(
    app: web.Application, chunks: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def send() -> bytes:
        runner, host, port = await served(app)
        head = f"POST /detokenize HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(head.encode() + b"Transfer-Encoding: chunked\r\n\r\n")
        await writer.drain()
        await asyncio.sleep(0.1)
        writer.write(chunks)
        writer.write_eof()
        answer = await reader.read()
        writer.close()
        await runner.cleanup()
        return answer

    # The connection has ended in the body, so there may be nobody to be answered.
    answer = asyncio.run(send())
    assert answer == b"" or b" 400 " in answer.splitlines()[0]
    assert "failed" not in caplog.text


async def exchange(app: web.Application, head: str, body: bytes = b"") -> tuple[bytes, bytes]:
    """Send a head; when the server has said something send the body. Return what came before and after."""
    runner, host, port = await served(app)
    reader, writer = await asyncio.open_connection(host, port)
    words = f"{head}\r\nHost: {host}\r\nConnection: close\r\nContent-Type: application/json\r\n"
    writer.write(f"{words}Content-Length: {len(BODY)}\r\n\r\n".encode())
    before = await reader.readuntil(b"\r\n\r\n")
    writer.write(body)
    after = await reader.read()
    writer.close()
    await runner.cleanup()
    return before, after


def test_a_body_is_asked_for_when_its_request_has_been_let_in(app: web.Application) -> None:
    expecting = "POST /detokenize HTTP/1.1\r\nExpect: 100-continue"
    before, after = asyncio.run(exchange(app, expecting, BODY))
    assert before == b"HTTP/1.1 100 Continue\r\n\r\n"
    assert after.startswith(b"HTTP/1.1 200 OK")
    assert after.endswith(b"[1, 2]")


@pytest.mark.parametrize(
    ("head", "status"),
    [
        ("POST /detokenize HTTP/1.1\r\nExpect: 100-continue\r\nContent-Encoding: gzip", 415),
        ("POST /detokenize HTTP/1.1\r\nExpect: 200-ok", 417),
    ],
)
def test_no_body_is_asked_for_otherwise(app: web.Application, head: str, status: int) -> None:
    before, after = asyncio.run(exchange(app, head))
    assert before.startswith(f"HTTP/1.1 {status} ".encode())
    assert b'"message"' in after


def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    bodies = BodyReader(ThreadPoolExecutor(1), is_lenient=False, patience_s=0.05)
    app = web.Application(middlewares=[Guard((), ()).middleware])

    async def handler(request: web.Request) -> web.Response:
        await bodies.read(request, DetokenizeBody)
        raise AssertionError("there is no body")

    app.router.add_post("/detokenize", handler)
    before, after = asyncio.run(exchange(app, "POST /detokenize HTTP/1.1"))
    assert before.startswith(b"HTTP/1.1 408 ")
    assert b"did not come within 0.05 s" in after


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("[::1]:80", 200),
        ("[::1]", 200),
        ("LOCALHOST:9000", 200),
        ("[::1].evil", 403),
        ("localhost:evil", 403),
        ("localhost:80:80", 403),
        ("evil@localhost", 403),
        ("localhost.evil", 403),
        ("evil:127.0.0.1", 403),
        ("[localhost]", 200),
    ],
)
def test_hosts(app: web.Application, host: str, status: int) -> None:
    assert post(app, BODY, Host=host)[0] == status


def test_a_failure_after_the_beginning_of_an_answer_breaks_it_off(app: web.Application) -> None:
    async def fail(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"the beginning")
        raise KeyError

    app.router.add_post("/fail", fail)
    with pytest.raises(ClientError):
        post(app, BODY, path="/fail")


TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.mark.parametrize(("sent", "told"), [({"traceparent": TRACE}, f" ({TRACE})"), ({}, "")])
def test_a_failure_names_request_trace_and_place_in_the_log_but_tells_nothing_of_the_prompt(
    app: web.Application, caplog: pytest.LogCaptureFixture, sent: dict[str, str], told: str
) -> None:
    async def fail(_request: web.Request) -> web.Response:
        raise KeyError("a part of the prompt")

    app.router.add_post("/fail", fail)
    status, _, body = post(app, BODY, path="/fail", x_request_id="mine", **sent)
    assert status == 500
    assert b"prompt" not in body
    begin = f"a request failed{told} [request id: mine]: KeyError at openai_server/test_guard.py:"
    assert caplog.records[-1].getMessage().startswith(begin)
    assert "prompt" not in caplog.text


def test_pages_of_an_allowed_origin_may_send_the_headers_of_official_clients(app: web.Application) -> None:
    async def ask() -> tuple[int, dict[str, str]]:
        runner, host, port = await served(app)
        asked = "authorization,content-type,x-stainless-lang,anthropic-version"
        sent = {"Origin": ORIGIN, "Access-Control-Request-Headers": asked}
        async with (
            ClientSession() as session,
            session.options(f"http://{host}:{port}/detokenize", headers=sent) as answer,
        ):
            found = answer.status, dict(answer.headers)
        await runner.cleanup()
        return found

    status, headers = asyncio.run(ask())
    assert status == 204
    assert headers["Access-Control-Allow-Origin"] == ORIGIN
    assert "x-stainless-lang" in headers["Access-Control-Allow-Headers"]


@pytest.mark.parametrize("origin", ["", ORIGIN, "https://other.example"])
def test_caches_tell_origins_apart(app: web.Application, origin: str) -> None:
    _, headers, _ = post(app, BODY, **({"Origin": origin} if origin else {}))
    assert headers["Vary"] == ["Accept-Encoding", "Origin"]
    assert headers.get("Access-Control-Allow-Origin") == ([ORIGIN] if origin == ORIGIN else None)


@pytest.mark.parametrize("more", ["", "Expect: 100-continue\r\n"])
def test_a_body_that_would_be_too_large_is_refused_before_it_comes(app: web.Application, more: str) -> None:
    async def ask() -> bytes:
        runner, host, port = await served(app, lingering_time=0)
        reader, writer = await asyncio.open_connection(host, port)
        head = f"POST /detokenize HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n{more}"
        writer.write(f"{head}Content-Length: {app._client_max_size + 1}\r\n\r\n".encode())
        answer = await asyncio.wait_for(reader.readuntil(b"}}"), 5)
        writer.close()
        await runner.cleanup()
        return answer

    answer = asyncio.run(ask())
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"\r\nConnection: close\r\n" in answer
    assert b'"code":"request_too_large"' in answer


def test_a_body_that_is_as_large_as_it_may_be_is_asked_for(app: web.Application) -> None:
    app._client_max_size = len(BODY)
    before, after = asyncio.run(exchange(app, "POST /detokenize HTTP/1.1\r\nExpect: 100-continue", BODY))
    assert before == b"HTTP/1.1 100 Continue\r\n\r\n"
    assert after.startswith(b"HTTP/1.1 200 ")
