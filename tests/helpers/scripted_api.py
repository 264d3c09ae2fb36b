"""A server that serves the real page, and answers chats with what a test has written."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from aiohttp import web

from helpers.engine_views import info, snapshot
from naiad.openai_server.api.answers import encode
from naiad.openai_server.api.engine_view import view_of
from naiad.openai_server.guard import Guard
from naiad.openai_server.page_routes import PageRoutes
from naiad.openai_server.route import add_routes

MODEL = "scripted"


@dataclass
class Script:
    """What the server answers with, and what it has been asked.

    Attributes:
        url: the page's address.
        pieces: deltas of the next answers: text, or other objects of a chunk's choice.
        refusal: status and message that chats are answered with instead.
        error: the message of an error event after the pieces; "" for an answer that is complete.
        key: the key that the API asks for; "" for none.
        is_held: the answer stays open after its pieces until the client leaves.
        is_operator: the engine view's viewer is one.
        num_open: answers that are being written.
        asked: bodies of chats.
        keys: `Authorization` headers of chats and of lists of models.
    """

    url: str = ""
    pieces: Sequence[str | dict[str, Any]] = ("Hello",)
    refusal: tuple[int, str] | None = None
    error: str = ""
    key: str = ""
    is_held: bool = False
    is_operator: bool = True
    num_open: int = 0
    asked: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)


@contextlib.contextmanager
def scripted_api(models: Sequence[str] = (MODEL,)) -> Iterator[Script]:
    """Serve in a thread of its own."""
    script = Script()
    loop = asyncio.new_event_loop()
    app = web.Application(middlewares=[Guard((), ()).middleware])
    add_routes(app, PageRoutes().routes())
    app.router.add_get("/v1/models", partial(_models, script, models))
    app.router.add_post("/v1/chat/completions", partial(_chat, script))
    app.router.add_get("/engine/events", partial(_events, script))
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1)

    async def start() -> None:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()

    loop.run_until_complete(start())
    script.url = f"http://127.0.0.1:{runner.addresses[0][1]}/"
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield script
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _models(script: Script, models: Sequence[str], request: web.Request) -> web.Response:
    if refused := _refused(script, request):
        return refused
    cards = [{"id": name, "object": "model", "max_model_len": 8192} for name in models]
    return web.json_response({"object": "list", "data": cards})


async def _chat(script: Script, request: web.Request) -> web.StreamResponse:
    if refused := _refused(script, request):
        return refused
    script.asked.append(await request.json())
    if script.refusal is not None:
        return _error(*script.refusal)
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    script.num_open += 1
    try:
        await _write_all(script, response)
    finally:
        script.num_open -= 1
    return response


async def _events(script: Script, request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    seen, tenant = snapshot("a", "b", "a"), "" if script.is_operator else "a"
    view = view_of(seen, info(), MODEL, {1: "chatcmpl-1"}, tenant=tenant, is_operator=script.is_operator)
    await response.write(b"event: snapshot\ndata: " + encode(view) + b"\n\n")
    await asyncio.sleep(600)
    return response


async def _write_all(script: Script, response: web.StreamResponse) -> None:
    await response.write(b": keep-alive\n\n")
    for number, piece in enumerate(script.pieces, 1):
        choice = {"index": 0, "delta": {"content": piece}} if isinstance(piece, str) else piece
        usage = {"prompt_tokens": 7, "completion_tokens": number, "total_tokens": 7 + number}
        await response.write(_event({"choices": [choice], "usage": usage}))
        # So that the browser gets more than one piece.
        await asyncio.sleep(0.002)
    if script.is_held:
        await asyncio.sleep(600)
    if script.error:
        error = {"message": script.error, "type": "server_error", "code": None, "param": None}
        await response.write(_event({"error": error}))
        return
    await response.write(_event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}))
    await response.write(b"data: [DONE]\n\n")


def _refused(script: Script, request: web.Request) -> web.Response | None:
    sent = request.headers.get("Authorization", "")
    script.keys.append(sent)
    if not script.key or sent == f"Bearer {script.key}":
        return None
    return _error(401, "A key is needed." if not sent else "This key is not known.")


def _error(status: int, message: str) -> web.Response:
    body = {"error": {"message": message, "type": "error", "code": "scripted", "param": None}}
    return web.json_response(body, status=status)


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"
