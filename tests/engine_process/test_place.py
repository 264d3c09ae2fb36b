"""Of the processes of one instance, one after another, the latest has the place."""

from __future__ import annotations

from pathlib import Path

import pytest

from naiad.engine_process import Instance, Place


@pytest.fixture
def places(tmp_path: Path) -> tuple[Place, Place]:
    """Those of an old and of a new process of one instance."""
    old, new = (Instance(tmp_path, "llm", number).place("1", "llm_0_0") for number in (0, 1))
    return old, new


def test_the_latest_process_has_it(places: tuple[Place, Place]) -> None:
    old, new = places
    old.take()
    assert not old.is_lost()
    new.take()
    assert old.is_lost()
    assert not new.is_lost()


def test_one_that_the_latest_gave_up_is_the_old_ones_again(places: tuple[Place, Place]) -> None:
    old, new = places
    old.take()
    new.take()
    new.give_up()
    assert not old.is_lost()
    assert new.is_lost()


def test_who_has_lost_it_gives_nothing_up(places: tuple[Place, Place]) -> None:
    old, new = places
    old.take()
    new.take()
    old.give_up()
    assert old.is_lost()
    assert not new.is_lost()


def test_other_instances_and_versions_have_their_own(tmp_path: Path) -> None:
    instances = [Instance(tmp_path, "llm", number) for number in range(3)]
    names = [("1", "llm_0_0"), ("1", "llm_0_1"), ("2", "llm_0_0")]
    places = [instance.place(*name) for instance, name in zip(instances, names, strict=True)]
    for place in places:
        place.take()
    assert not any(place.is_lost() for place in places)
    for place in places:
        place.give_up()
    assert list(tmp_path.iterdir()) == []


def test_without_its_directory_it_is_not_lost(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    place = Instance(tmp_path / "gone", "llm", 0).place("1", "llm_0_0")
    place.take()
    for path in (tmp_path / "gone").iterdir():
        path.unlink()
    (tmp_path / "gone").rmdir()
    assert not place.is_lost()
