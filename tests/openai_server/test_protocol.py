"""What is no HTTP, or asks for another host than it seems, gets the API's errors."""

from __future__ import annotations

import asyncio
import json

import pytest
from aiohttp import web

from naiad.openai_server.guard import Guard
from naiad.openai_server.protocol import protocols_of

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def exchange(raw: bytes) -> tuple[int, list[bytes], str]:
    """Send bytes; return the answer's status, the lines of its head, and the error's message."""

    async def handler(_: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "no error"}})

    async def inside() -> bytes:
        guard = Guard((), ())
        app = web.Application(middlewares=[guard.middleware])
        app.on_response_prepare.append(guard.prepare)
        app.router.add_post("/v1/completions", handler)
        runner = web.AppRunner(app)
        await runner.setup()
        server = runner.server
        assert server is not None
        loop = asyncio.get_running_loop()
        listener = await loop.create_server(protocols_of(server), "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*listener.sockets[0].getsockname())
        writer.write(raw)
        answer = await asyncio.wait_for(reader.read(), 30)
        writer.close()
        listener.close()
        await runner.cleanup()
        return answer

    head, _, body = asyncio.run(inside()).partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    return int(lines[0].split()[1]), lines[1:], json.loads(body)["error"]["message"]


def test_what_is_served_is_served() -> None:
    body = b"Content-Length: 2\r\nConnection: close\r\n\r\n{}"
    assert exchange(HEAD + body)[::2] == (200, "no error")
    for host in (b"127.0.0.1:1", b"localhost", b"[::1]:8000"):
        assert exchange(HEAD.replace(b" /v1", b" http://%b/v1" % host) + body)[::2] == (200, "no error")


@pytest.mark.parametrize(
    "raw",
    [
        b"nonsense\r\n\r\n",
        b"GET /v1/models HTTP/9.9\r\nHost: localhost\r\n\r\n",
        b"G\x01T / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        HEAD + b"Content-Length: -1\r\n\r\n",
        HEAD + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}",
        HEAD + b"no colon\r\n\r\n",
        b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        HEAD + b"Long: " + b"b" * 20_000 + b"\r\n\r\n",
        b"GET * HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET http:///v1 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET http://xn--/v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        b"CONNECT xn--:80 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    ],
)
def test_what_is_no_http_gets_an_error_body_that_names_no_library(raw: bytes) -> None:
    status, lines, message = exchange(raw)
    assert status == 400
    assert message.startswith("This is no valid HTTP request: ")
    assert message.endswith(".")
    assert not any(part in message for part in ("\n", "b'", ".."))
    assert b"Server: naiad" in lines
    assert b"Content-Type: application/json" in lines
    assert not any(b"aiohttp" in line.lower() for line in lines)


def test_a_whole_url_as_the_target_must_name_an_allowed_host() -> None:
    raw = (
        HEAD.replace(b" /v1", b" http://evil.example/v1")
        + b"Content-Length: 2\r\nConnection: close\r\n\r\n{}"
    )
    status, _, message = exchange(raw)
    assert (status, message.partition(":")[0]) == (403, "Host = 'evil.example' is not allowed")


def test_a_body_may_come_in_chunks_only_plainly() -> None:
    chunks = b"Connection: close\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
    assert exchange(HEAD + b"Transfer-Encoding: Chunked\r\n" + chunks)[::2] == (200, "no error")
    status, _, message = exchange(HEAD + b"Transfer-Encoding: gzip, chunked\r\n" + chunks)
    assert (status, message) == (501, "Transfer-Encoding = 'gzip, chunked': expected chunked.")
