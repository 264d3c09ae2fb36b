"""A model that the server unloads belongs to nobody until it is loaded again."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from naiad.cli.serve.unloading import Unloading, VersionState
from naiad.engine_process import Instance


class World:
    """A process of a model whose server says how it is."""

    def __init__(self, directory: Path) -> None:
        self.place = Instance(directory, "llm", 0).place("1")
        self.place.take(time.monotonic())
        self._number_lock = Instance(directory, "llm", 0).number_lock()
        assert self._number_lock.try_take()
        self._unloading = Unloading(lambda: [directory])

    def says(self, state: str) -> None:
        others = [VersionState("llm", "2", "READY"), VersionState("tokenizer", "1", "UNLOADING")]
        self._unloading.take([*others, VersionState("llm", "1", state)])

    @property
    def is_lost(self) -> bool:
        return self.place.is_lost(time.monotonic() - 1)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_a_model_that_is_not_unloading_keeps_its_place(world: World) -> None:
    for state in ("READY", "LOADING", "UNAVAILABLE", ""):
        world.says(state)
        assert not world.is_lost


def test_a_late_request_has_the_place_until_the_server_is_asked_again(world: World) -> None:
    world.says("UNLOADING")
    assert world.is_lost
    world.place.take(time.monotonic())
    assert not world.is_lost
    world.says("UNLOADING")
    assert world.is_lost


def test_a_model_that_is_loaded_again_is_free(world: World) -> None:
    world.says("UNLOADING")
    world.says("LOADING")
    assert not world.is_lost


def test_only_models_with_processes_of_ours_have_places(world: World, tmp_path: Path) -> None:
    world.says("UNLOADING")
    assert [path.name for path in tmp_path.glob("*.place")] == ["llm.1.place"]


def test_a_place_that_can_not_be_written_stays(tmp_path: Path, world: World) -> None:
    missing = tmp_path / "missing"
    unloading = Unloading(lambda: [missing])
    unloading.take([VersionState("llm", "1", "UNLOADING")])
    (tmp_path / "llm.1.place").unlink()
    (tmp_path / "llm.1.place").mkdir()
    for state in ("UNLOADING", "READY"):
        world.says(state)
    assert not missing.exists()
