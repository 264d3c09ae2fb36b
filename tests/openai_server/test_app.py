"""What runs beside the OpenAI server."""

from __future__ import annotations

import asyncio
import os
import queue

import pytest
from aiohttp import web

from naiad.openai_server import app
from naiad.openai_server.app import ServerOptions, make_app


def test_freed_memory_is_given_back_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    given: queue.Queue[None] = queue.Queue()
    monkeypatch.setattr(app, "give_back_memory", lambda: given.put(None))
    monkeypatch.setattr(app, "_GIVE_BACK_S", 0.01)

    async def serve() -> None:
        runner = web.AppRunner(make_app(ServerOptions(server_pid=os.getpid())))
        await runner.setup()
        try:
            for _ in range(3):
                await asyncio.to_thread(given.get, timeout=30)
        finally:
            await runner.cleanup()

    asyncio.run(serve())
