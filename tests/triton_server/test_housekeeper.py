from __future__ import annotations

import os
from typing import Any

import pytest

from helpers.engine_harness import wait_until
from naiad.triton_server.service.housekeeper import Housekeeper


class Server:
    """The service, the lock and the metrics in one; counts the calls that would reach the server."""

    stats = None
    observations: Any = None

    def __init__(self) -> None:
        self.observations = self
        self.calls = 0

    def housekeep(self) -> float:
        self.calls += 1
        return 0.0

    def rest(self, pause_s: float) -> None:
        pass

    def take(self) -> None:
        pass

    def try_take(self) -> bool:
        return True

    def release(self) -> None:
        pass

    def update(self, stats: Any, batch: Any) -> bool:
        self.calls += 1
        return False

    def open_streams(self) -> list[Any]:
        return []

    def delete(self) -> None:
        pass


def test_a_server_that_has_died_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing a metric would never return, and would hold the lock that the watch over the server needs."""
    server: Any = Server()
    housekeeper = Housekeeper(server, server, lambda: server)
    wait_until(lambda: server.calls > 10)

    monkeypatch.setattr(os, "getppid", lambda: 1_000_000_000)

    wait_until(lambda: not housekeeper._thread.is_alive())
    calls = server.calls
    housekeeper.stop()
    assert server.calls == calls
