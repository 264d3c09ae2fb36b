from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from helpers.engine_harness import wait_until
from naiad.triton_server.service import housekeeper as housekeeping
from naiad.triton_server.service.housekeeper import Housekeeper


class Server:
    """All that a housekeeper has to do with, in one; counts the calls that would reach the server."""

    stats = None
    observations: Any = None

    def __init__(self, has_news: bool = False, has_more: bool = False, pause_s: float = 0.0) -> None:
        self.observations = self
        self.calls = 0
        self.rounds = 0
        self.writes = 0
        self._has_news = has_news
        self._has_more = has_more
        self._pause_s = pause_s

    def housekeep(self) -> float:
        self.calls += 1
        self.rounds += 1
        return self._pause_s

    def rest(self, pause_s: float) -> bool:
        return self._has_news

    def take(self) -> None:
        pass

    def try_take(self) -> bool:
        return True

    def release(self) -> None:
        pass

    def update(self, stats: Any, batch: Any) -> bool:
        self.calls += 1
        self.writes += 1
        return self._has_more

    def open_streams(self) -> list[Any]:
        return [self]

    def delete(self) -> None:
        pass

    def look(self, service: Any) -> None:
        pass


def test_a_server_that_has_died_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing a metric would never return, and would hold the lock that the watch over the server needs."""
    server: Any = Server()
    housekeeper = Housekeeper(server, server, lambda: server, server)
    wait_until(lambda: server.calls > 10)

    monkeypatch.setattr(os, "getppid", lambda: 1_000_000_000)

    wait_until(lambda: not housekeeper._thread.is_alive())
    calls = server.calls
    housekeeper.stop()
    assert server.calls == calls


@contextmanager
def running(server: Any) -> Iterator[None]:
    housekeeper = Housekeeper(server, server, lambda: server, server)
    try:
        yield
    finally:
        housekeeper.stop()


@pytest.fixture
def endless_period(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(housekeeping, "WRITE_PERIOD_S", 1e9)


@pytest.mark.usefixtures("endless_period")
def test_metrics_are_not_written_in_every_round() -> None:
    server = Server()
    with running(server):
        wait_until(lambda: server.rounds > 10)
    assert server.writes == 1


@pytest.mark.usefixtures("endless_period")
@pytest.mark.parametrize("server", [Server(has_news=True), Server(has_more=True), Server(pause_s=2e9)])
def test_news_and_what_there_was_no_time_for_are_written_at_once_and_all_before_a_long_rest(
    server: Server,
) -> None:
    with running(server):
        wait_until(lambda: server.writes > 10)
    assert server.writes == server.rounds


def test_metrics_are_written_again_after_their_period(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(housekeeping, "WRITE_PERIOD_S", 0.0)
    server = Server()
    with running(server):
        wait_until(lambda: server.writes > 10)
    assert server.writes == server.rounds
