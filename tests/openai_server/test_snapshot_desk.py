"""Questions to an engine are shared, and end with an error when the engine is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest

from helpers.engine_views import info, snapshot
from naiad.engine_process import AttachedClient, Ready
from naiad.engine_process.protocol import SnapshotTaken
from naiad.errors import EngineAwayError
from naiad.openai_server.engines.snapshot_desk import SnapshotDesk

PATIENCE_S = 30


class FakeClient:
    """Answers when told to."""

    def __init__(self) -> None:
        self.info: Ready | None = info()
        self.num_asked = 0

    def ask_snapshot(self) -> Ready:
        self.num_asked += 1
        if self.info is None:
            raise EngineAwayError("it does not serve now")
        return self.info


def run(test: Callable[[SnapshotDesk, FakeClient], Coroutine[Any, Any, None]]) -> None:
    async def all_of_it() -> None:
        with ThreadPoolExecutor(1) as pool:
            desk = SnapshotDesk(asyncio.get_running_loop(), pool, {5: "chatcmpl-5"}.get)
            client = FakeClient()
            desk.client = cast(AttachedClient, client)
            await asyncio.wait_for(test(desk, client), PATIENCE_S)

    asyncio.run(all_of_it())


async def asked(client: FakeClient, number: int) -> None:
    while client.num_asked < number:
        await asyncio.sleep(0.005)


def test_those_who_ask_together_share_one_question() -> None:
    async def test(desk: SnapshotDesk, client: FakeClient) -> None:
        asking = [asyncio.create_task(desk.get()) for _ in range(5)]
        await asked(client, 1)
        desk.take(SnapshotTaken(snapshot("a", "b"), {2: 5, 1: 6}))
        answers = await asyncio.gather(*asking)
        assert len({id(each) for each in answers}) == 1
        # An ended sequence has no name any more.
        assert answers[0].request_ids == {2: "chatcmpl-5"}
        assert answers[0].info is client.info
        # An answer that has just come serves the next one, too.
        assert await desk.get() is answers[0]
        assert client.num_asked == 1

    run(test)


def test_one_who_leaves_does_not_end_the_others_question() -> None:
    async def test(desk: SnapshotDesk, client: FakeClient) -> None:
        leaving, staying = asyncio.create_task(desk.get()), asyncio.create_task(desk.get())
        await asked(client, 1)
        leaving.cancel()
        desk.take(SnapshotTaken(snapshot("a"), {}))
        assert (await staying).snapshot.rows
        with pytest.raises(asyncio.CancelledError):
            await leaving

    run(test)


@pytest.mark.parametrize("successor", [None, info(created_s=200)])
def test_an_engine_lost_before_its_answer_is_an_error(successor: Ready | None) -> None:
    async def test(desk: SnapshotDesk, client: FakeClient) -> None:
        asking = asyncio.create_task(desk.get())
        await asked(client, 1)
        client.info = successor
        with pytest.raises(EngineAwayError, match="does not serve now"):
            await asking
        client.info = info()
        again = asyncio.create_task(desk.get())
        await asked(client, 2)
        desk.take(SnapshotTaken(snapshot(), {}))
        assert (await again).snapshot.rows == []

    run(test)


def test_without_an_engine_the_question_fails() -> None:
    async def test(desk: SnapshotDesk, client: FakeClient) -> None:
        client.info = None
        for _ in range(2):
            with pytest.raises(EngineAwayError):
                await desk.get()

    run(test)
