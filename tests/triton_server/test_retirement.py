"""When a process of a model takes it that the server has replaced it."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from helpers.engine_harness import wait_until
from naiad.engine_process import Instance
from naiad.triton_server.service.retirement import RETIRE_AFTER_S, Retirement


class World:
    """The clock, the service and the server's answers, and what the process has done."""

    def __init__(self, directory: Path, clock: list[float]) -> None:
        self._clock = clock
        self.last_asked_s = 0.0
        self.streams: list[Any] = []
        self.num_left = 0
        self.lines: list[str] = []
        self.later = Instance(directory, "llm", 1).place("1")
        self.retirement = Retirement(
            Instance(directory, "llm", 0).place("1"),
            self._leave,
            self.lines.append,
        )

    @property
    def now_s(self) -> float:
        return self._clock[0]

    def open_streams(self) -> list[Any]:
        return self.streams

    def _leave(self) -> None:
        self.num_left += 1

    def go_on(self, seconds: float, asked_every_s: float = 1e9) -> None:
        """Let the time go by, with rounds of housekeeping, and requests now and then."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self._clock[0] += 0.5
            if self.now_s % asked_every_s < 0.5:
                self.last_asked_s = self.now_s
            service: Any = self
            self.retirement.look(service)
        wait_until(lambda: not any(each.name == "naiad-retirement" for each in threading.enumerate()))


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    return World(tmp_path, clock)


def test_one_that_rests_stays(world: World) -> None:
    world.go_on(100 * RETIRE_AFTER_S)
    assert world.num_left == 0
    assert world.lines == []


def test_one_that_was_replaced_leaves_once_when_it_has_rested(world: World) -> None:
    world.go_on(10, asked_every_s=1)
    world.go_on(0.5)
    world.later.take(world.now_s)
    world.go_on(RETIRE_AFTER_S - 3)
    assert world.num_left == 0
    world.go_on(6)
    assert world.num_left == 1
    assert "has replaced" in world.lines[0]
    world.go_on(10 * RETIRE_AFTER_S)
    world.retirement.leave()
    assert world.num_left == len(world.lines) == 1
    assert not world.later.is_lost(world.now_s)


def test_one_with_requests_stays(world: World) -> None:
    world.later.take(world.now_s)
    world.streams = [object()]
    world.go_on(2 * RETIRE_AFTER_S)
    world.streams = []
    # Whoever is asked takes the place again.
    world.go_on(3 * RETIRE_AFTER_S, asked_every_s=RETIRE_AFTER_S / 2)
    assert world.num_left == 0


def test_one_that_was_loaded_after_another_was_asked_stays(world: World, tmp_path: Path) -> None:
    world.later.take(world.now_s - 1)
    world.go_on(10 * RETIRE_AFTER_S)
    assert world.num_left == 0


def test_one_whose_successor_could_not_start_stays(world: World) -> None:
    world.later.take(world.now_s)
    world.go_on(RETIRE_AFTER_S / 2)
    world.later.give_up()
    world.go_on(10 * RETIRE_AFTER_S)
    assert world.num_left == 0


def test_leaving_twice_waits_for_the_first(world: World) -> None:
    world.retirement.leave()
    world.retirement.leave()
    assert world.num_left == 1


def test_one_of_several_instances_never_retires(world: World) -> None:
    retirement = Retirement(None, world.retirement.leave, world.lines.append)
    world.later.take(world.now_s)
    world.retirement = retirement
    world.go_on(10 * RETIRE_AFTER_S)
    assert world.lines == []


def test_a_place_that_can_not_be_read_is_not_lost(world: World, tmp_path: Path) -> None:
    world.later.take(world.now_s)
    (path,) = tmp_path.glob("*.place")
    path.unlink()
    path.mkdir()
    world.go_on(10 * RETIRE_AFTER_S)
    assert world.num_left == 0
