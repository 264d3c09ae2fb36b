"""Everybody who watches an engine is told by one question to it, and nobody is asked for without watchers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from helpers.engine_views import info, seen
from naiad.errors import EngineAwayError, NaiadError, UnavailableError
from naiad.openai_server.api.errors import APIError, unknown_model
from naiad.openai_server.engine_watch import EngineWatch, News, Watcher
from naiad.openai_server.engines.snapshot_desk import NamedSnapshot

PATIENCE_S = 30


class FakeModel:
    def __init__(self) -> None:
        self.engine = info()
        self.error: NaiadError | None = None
        self.lookup_error: Exception | None = None
        self.num_asked = 0

    def find(self, name: str) -> FakeModel:
        assert name == "m"
        if self.lookup_error is not None:
            raise self.lookup_error
        return self

    async def snapshot(self) -> NamedSnapshot:
        self.num_asked += 1
        if self.error is not None:
            raise self.error
        return seen(self.engine, "a")


def run(test: Callable[[FakeModel, EngineWatch], Awaitable[None]]) -> None:
    async def all_of_it() -> None:
        model = FakeModel()
        watch = EngineWatch(model.find, period_s=0.01)
        await asyncio.wait_for(test(model, watch), PATIENCE_S)
        watch.close()

    asyncio.run(all_of_it())


async def until(watcher: Watcher, name: str) -> list[News]:
    """All news up to the first event of this name."""
    news: list[News] = []
    while not any(each.name == name for each in news):
        news += await watcher.next()
    return news


def test_two_watchers_are_one_question() -> None:
    async def test(model: FakeModel, watch: EngineWatch) -> None:
        first, second = watch.enter("m"), watch.enter("m")
        for _ in range(3):
            num_before = model.num_asked
            seen_first, seen_second = (await first.next())[-1], (await second.next())[-1]
            assert seen_first.seen is seen_second.seen is not None
            assert model.num_asked - num_before <= 1
        watch.leave("m", first)
        await until(second, "snapshot")

    run(test)


def test_nobody_is_asked_when_the_last_watcher_has_left() -> None:
    async def test(model: FakeModel, watch: EngineWatch) -> None:
        watchers = [watch.enter("m") for _ in range(3)]
        await until(watchers[0], "snapshot")
        for watcher in watchers:
            watch.leave("m", watcher)
        await asyncio.sleep(0)
        num_asked = model.num_asked
        await asyncio.sleep(0.1)
        assert model.num_asked == num_asked
        watcher = watch.enter("m")
        assert (await watcher.next())[-1].name == "snapshot"
        assert model.num_asked > num_asked

    run(test)


def test_an_engine_that_restarts_is_told_once_and_comes_back() -> None:
    async def test(model: FakeModel, watch: EngineWatch) -> None:
        watcher = watch.enter("m")
        await until(watcher, "snapshot")
        model.error = EngineAwayError("away for a moment")
        (notice,) = [each for each in await until(watcher, "away") if each.name == "away"]
        assert notice.notice is not None
        assert (notice.notice.model, notice.notice.message) == ("m", "away for a moment")
        late = watch.enter("m")
        assert [each.name for each in await late.next()] == ["away"]
        model.error, model.engine = None, info(created_s=200)
        news = await until(watcher, "snapshot")
        assert [each.name for each in news] == ["restarted", "snapshot"]
        assert news[-1].seen is not None
        assert news[-1].seen.info.created_s == 200

    run(test)


def test_a_quick_restart_is_told_although_the_engine_was_never_away() -> None:
    async def test(model: FakeModel, watch: EngineWatch) -> None:
        watcher = watch.enter("m")
        await until(watcher, "snapshot")
        model.engine = info(created_s=200)
        await until(watcher, "restarted")

    run(test)


def test_an_engine_that_cannot_tell_is_away() -> None:
    async def test(model: FakeModel, watch: EngineWatch) -> None:
        model.error = UnavailableError("too old")
        (news,) = await watch.enter("m").next()
        assert news.name == "away"

    run(test)


def test_an_unloaded_model_is_gone() -> None:
    async def test(model: FakeModel, watch: EngineWatch) -> None:
        watcher = watch.enter("m")
        await until(watcher, "snapshot")
        model.lookup_error = unknown_model("m")
        news = await until(watcher, "gone")
        assert isinstance(model.lookup_error, APIError)
        assert news[-1].notice is not None
        assert "does not exist" in news[-1].notice.message

    run(test)


def test_a_slow_watcher_gets_only_the_newest_snapshot() -> None:
    async def test(model: FakeModel, watch: EngineWatch) -> None:
        watcher = watch.enter("m")
        while model.num_asked < 5:
            await asyncio.sleep(0.01)
        news = await watcher.next()
        assert [each.name for each in news] == ["snapshot"]

    run(test)


def test_a_nudge_is_no_news() -> None:
    async def test(model: FakeModel, watch: EngineWatch) -> None:
        watcher = Watcher()
        watcher.nudge()
        assert await watcher.next() == []

    run(test)
