"""How many streams of the engine view there may be."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import ClientResponse, ClientSession, web

from helpers.engine_views import info, seen
from naiad.openai_server import engine_routes
from naiad.openai_server.access.gate import Gate
from naiad.openai_server.access.key_file import digest_of
from naiad.openai_server.engine_routes import EngineRoutes
from naiad.openai_server.engine_watch import EngineWatch
from naiad.openai_server.engines.snapshot_desk import NamedSnapshot
from naiad.openai_server.guard import Guard
from naiad.openai_server.route import add_routes
from naiad.openai_server.streams import StreamWatch

PATIENCE_S = 60

Open = Callable[..., Awaitable[ClientResponse]]


@pytest.fixture(autouse=True)
def bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_routes, "MAX_EVENT_STREAMS", 2)


class FakeModel:
    async def snapshot(self) -> NamedSnapshot:
        return seen(info(), "a")


def run(test: Callable[[Open], Awaitable[None]], gate: Gate | None = None) -> None:
    async def served() -> None:
        model = FakeModel()
        models: Any = SimpleNamespace(get=lambda _name: model, by_name=lambda: {"m": model})
        watch = EngineWatch(models.get, period_s=0.01)
        app = web.Application(middlewares=[Guard((), (), gate).middleware])
        add_routes(app, EngineRoutes(models, watch, StreamWatch(60, 60)).routes())
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0]
        async with ClientSession() as session:

            async def open_one(key: str = "") -> ClientResponse:
                headers = {"Authorization": f"Bearer {key}"} if key else {}
                return await session.get(f"http://{host}:{port}/engine/events", headers=headers)

            await asyncio.wait_for(test(open_one), PATIENCE_S)
        await runner.cleanup()

    asyncio.run(served())


async def refused(answer: ClientResponse) -> str:
    assert (answer.status, answer.headers["Retry-After"]) == (429, "1")
    message: str = (await answer.json())["error"]["message"]
    return message


def test_one_stream_too_many_is_refused_until_another_has_ended() -> None:
    async def test(open_one: Open) -> None:
        first, second = await open_one(), await open_one()
        assert (first.status, second.status) == (200, 200)
        message = await refused(await open_one())
        assert message == "Too many streams of /engine/events: at most 2 are allowed."
        first.close()
        while (third := await open_one()).status != 200:
            await asyncio.sleep(0.01)
        assert b"event: snapshot\n" in await third.content.readline()
        second.close()
        third.close()

    run(test)


def test_a_stream_ends_when_its_key_is_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"

    def write(*names: str) -> None:
        keys = [{"name": name, "sha256": digest_of(name), "tenant": "t"} for name in names]
        path.write_text(json.dumps({"keys": keys}))
        path.chmod(0o600)

    async def test(open_one: Open) -> None:
        kept, lost = await open_one("a"), await open_one("b")
        assert b"event: snapshot\n" in await lost.content.readline()
        write("a")
        gate.reload()
        while await lost.content.readline():
            pass
        assert lost.content.at_eof()
        for _ in range(50):
            assert await kept.content.readline()
        kept.close()

    write("a", "b")
    gate = Gate(path)
    run(test, gate)


def test_each_key_has_its_own_streams(tmp_path: Path) -> None:
    async def test(open_one: Open) -> None:
        # Requests of their own limit do not count these streams.
        mine = [await open_one("a"), await open_one("a")]
        assert "with the key a: at most 2" in await refused(await open_one("a"))
        theirs = await open_one("b")
        assert [each.status for each in (*mine, theirs)] == [200] * 3
        for each in (*mine, theirs):
            each.close()

    path = tmp_path / "keys.json"
    limits = {"concurrent_requests": 1}
    keys = [{"name": name, "sha256": digest_of(name), "tenant": "t", "limits": limits} for name in "ab"]
    path.write_text(json.dumps({"keys": keys}))
    path.chmod(0o600)
    run(test, Gate(path))
