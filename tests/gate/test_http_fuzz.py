"""Mutated requests: each is answered or ends its connection, and what reaches the server is well-formed."""

from __future__ import annotations

import asyncio
import random
import re
from typing import Any

import pytest

from helpers.gate_doors import GENERATE, LAST_CHUNK, PATIENCE_S, STREAM, Setting, a_door, chunk, get, post
from naiad.gate import http_door
from naiad.gate.limits import Limits

NUM_CASES = 1500
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
TRACE = f"00-{1:032x}-{2:016x}-01"
SEEDS = [
    post(GENERATE, b'{"text_input": "a", "stop_words": ["x", {"y": [1, 2.5e3]}]}', f"traceparent: {TRACE}"),
    post(STREAM, b'{"a": 1}', "Expect: 100-continue"),
    post("/v2/models/m/infer", b'{"inputs": [{"name": "a", "parameters": {"binary_data_size": 2}}]}ab')
    + b"GET /v2/logging HTTP/1.1\r\nHost: localhost\r\n\r\n",
    get("/v2/health/ready", "Connection: keep-alive") + get("/v2"),
    f"POST {GENERATE} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    + chunk(b'{"a"')
    + chunk(b": 1}")
    + LAST_CHUNK,
]
PIECES = [
    *(
        b"\r\n",
        b"\n",
        b"\r",
        b"\0",
        b" ",
        b"\t",
        b":",
        b"\xff",
        b"\xb2",
        b"0",
        b"-1",
        b"99999999999999",
        b"{",
        b"[",
    ),
    *(
        b"Transfer-Encoding: chunked\r\n",
        b"Content-Length: 3\r\n",
        b"\r\n\r\n",
        b"HTTP/1.0",
        b"POST ",
        b"%2e%2e/",
    ),
    *(
        b"Inference-Header-Content-Length: 1\r\n",
        b"Connection: close\r\n",
        b'"',
        b"\\ud800",
        b"1e999",
        b"ffffffff\r\n",
    ),
]
# What the server may get: one request line of a route, and known headers.
HEAD = re.compile(
    rb"(GET|POST) /v2[\w/.-]* HTTP/1\.1\r\nHost: 127\.0\.0\.1:\d+\r\n"
    rb"(Content-Type: application/json\r\nContent-Length: \d+\r\n)?"
    rb"(Inference-Header-Content-Length: \d+\r\n)?"
    rb"((naiad-model-control-key|traceparent|tracestate): [^\r\n\0]*\r\n)*\r\n"
)


def mutated(draw: random.Random) -> bytes:
    raw = draw.choice(SEEDS)
    for _ in range(draw.randrange(1, 5)):
        at = draw.randrange(len(raw) + 1)
        kind = draw.randrange(4)
        if kind == 0:
            raw = raw[:at] + draw.choice(PIECES) + raw[at:]
        elif kind == 1:
            raw = raw[:at] + raw[at + draw.randrange(1, 20) :]
        elif kind == 2:
            raw = raw[:at] + bytes([draw.randrange(256)]) + raw[at + 1 :]
        else:
            raw = raw[:at] + raw[max(0, at - draw.randrange(40)) :]
    return raw


async def send(setting: Setting, raw: bytes) -> None:
    reader, writer = await setting.connect()
    writer.write(raw)
    try:
        await asyncio.wait_for(reader.read(), PATIENCE_S)
    except ConnectionResetError:
        # What was sent behind a request that is refused.
        pass
    finally:
        writer.close()


def test_mutated_requests_harm_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_door, "_LOOK_S", 0.02)
    limits = Limits(max_head_bytes=2000, max_body_bytes=5000, head_s=0.05, body_s=0.05, idle_s=0.05)
    faults: list[dict[str, Any]] = []

    async def inside() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: faults.append(context))
        async with a_door(limits) as setting:
            setting.server.answer = OK
            draw = random.Random(20)
            for _ in range(NUM_CASES // 50):
                await asyncio.gather(*(send(setting, mutated(draw)) for _ in range(50)))
            while setting.door._connections:
                await asyncio.sleep(0.01)
            assert setting.door._num_held_bytes == 0
            assert setting.door.num_refused > NUM_CASES / 4
            heads = [request.partition(b"\r\n\r\n")[0] + b"\r\n\r\n" for request in setting.server.requests]
            assert len(heads) > NUM_CASES / 50
            assert [head for head in heads if not HEAD.fullmatch(head) or b"logging" in head] == []

    asyncio.run(inside())
    assert faults == []
