"""Keeps everybody who watches an engine informed, with one question to the engine for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from naiad.engine_process import Ready
from naiad.errors import NaiadError
from naiad.openai_server.api.engine_view import EngineNotice
from naiad.openai_server.api.errors import APIError
from naiad.openai_server.engines.snapshot_desk import NamedSnapshot

PERIOD_S = 0.5


class WatchedModel(Protocol):
    """The part of a model that is watched, such as `LocalModel`."""

    async def snapshot(self) -> NamedSnapshot:
        """What its engine is doing; raises a NaiadError while it does not serve."""


@dataclass(frozen=True, slots=True)
class News:
    """What has happened.

    Attributes:
        name: the event's name: `snapshot`, `away`, `restarted` or `gone`.
        seen: with `snapshot`.
        notice: with the others.
    """

    name: str
    seen: NamedSnapshot | None = None
    notice: EngineNotice | None = None


class Watcher:
    """One client that watches. It gets notices in order, and of several snapshots only the newest."""

    def __init__(self) -> None:
        """Start without news."""
        self._notices: list[News] = []
        self._newest: News | None = None
        self._arrived = asyncio.Event()

    def put(self, news: News) -> None:
        """Add news."""
        if news.seen is not None:
            self._newest = news
        else:
            # What was seen before no longer holds.
            self._newest = None
            self._notices.append(news)
        self._arrived.set()

    def nudge(self) -> None:
        """Make `next` return now."""
        self._arrived.set()

    async def next(self) -> list[News]:
        """Wait for news and return them; none after a `nudge`."""
        await self._arrived.wait()
        self._arrived.clear()
        news, self._notices = self._notices, []
        if self._newest is not None:
            news.append(self._newest)
            self._newest = None
        return news


class EngineWatch:
    """Asks each engine that somebody watches twice a second, and no other. Belongs to the event loop."""

    def __init__(self, find: Callable[[str], WatchedModel], period_s: float = PERIOD_S) -> None:
        """Set up.

        Args:
            find: finds the model of a name; raises an APIError if there is none, and an EngineAwayError while
                its engine restarts.
            period_s: seconds between two questions.
        """
        self._find = find
        self._period_s = period_s
        self._watchers: dict[str, set[Watcher]] = {}
        self._last: dict[str, News] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def enter(self, model: str) -> Watcher:
        """Begin to watch a model."""
        watcher = Watcher()
        if model in self._last:
            watcher.put(self._last[model])
        self._watchers.setdefault(model, set()).add(watcher)
        if model not in self._tasks:
            self._tasks[model] = asyncio.create_task(self._run(model))
        return watcher

    def leave(self, model: str, watcher: Watcher) -> None:
        """End to watch; the last one that leaves ends the questions."""
        watchers = self._watchers.get(model, set())
        watchers.discard(watcher)
        if not watchers and model in self._tasks:
            del self._watchers[model]
            self._last.pop(model, None)
            self._tasks.pop(model).cancel()

    def close(self) -> None:
        """End all questions."""
        for task in self._tasks.values():
            task.cancel()

    async def _run(self, model: str) -> None:
        info: Ready | None = None
        was_away = False
        while True:
            try:
                seen = await self._find(model).snapshot()
            except (NaiadError, APIError) as error:
                if isinstance(error, APIError) or not was_away:
                    name = "gone" if isinstance(error, APIError) else "away"
                    self._tell(model, News(name, notice=EngineNotice(model=model, message=_message(error))))
                was_away = True
            else:
                if info is not None and info is not seen.info:
                    notice = EngineNotice(model=model, message="the engine has started again")
                    self._tell(model, News("restarted", notice=notice))
                info, was_away = seen.info, False
                self._tell(model, News("snapshot", seen))
            await asyncio.sleep(self._period_s)

    def _tell(self, model: str, news: News) -> None:
        self._last[model] = news
        for watcher in self._watchers[model]:
            watcher.put(news)


def _message(error: NaiadError | APIError) -> str:
    return error.message if isinstance(error, APIError) else str(error)
