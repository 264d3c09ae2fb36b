"""Of the processes of one model, one after another, the one that was asked last has the place."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from naiad.engine_process import Instance, Place


@pytest.fixture
def places(tmp_path: Path) -> tuple[Place, Place]:
    """Those of an old and of a new process of one model."""
    old, new = (Instance(tmp_path, "llm", number).place("1") for number in (0, 1))
    return old, new


def test_who_was_asked_last_has_it(places: tuple[Place, Place]) -> None:
    old, new = places
    assert not old.is_lost(0.0)
    old.take(1.5)
    assert not old.is_lost(1.5)
    new.take(2.25)
    assert old.is_lost(1.5)
    assert not new.is_lost(2.25)
    old.take(3.0)
    assert new.is_lost(2.25)


def test_whoever_looks_later_does_not_win_by_it(places: tuple[Place, Place]) -> None:
    old, new = places
    new.take(2.0)
    old.take(1.0)
    assert old.is_lost(1.0)
    assert not new.is_lost(2.0)


def test_one_that_was_given_up_is_nobodys(places: tuple[Place, Place]) -> None:
    old, new = places
    old.take(1.0)
    new.take(2.0)
    new.give_up()
    assert not old.is_lost(1.0)
    assert not new.is_lost(2.0)


def test_who_has_lost_it_gives_nothing_up(places: tuple[Place, Place]) -> None:
    old, new = places
    old.take(1.0)
    new.take(2.0)
    old.give_up()
    assert old.is_lost(1.0)
    assert not new.is_lost(2.0)


def test_versions_have_their_own(tmp_path: Path) -> None:
    places = [Instance(tmp_path, "llm", number).place(str(number)) for number in range(3)]
    for asked_s, place in enumerate(places):
        place.take(float(asked_s))
    assert not any(place.is_lost(float(asked_s)) for asked_s, place in enumerate(places))
    for place in places:
        place.give_up()
    assert list(tmp_path.iterdir()) == []


def test_a_time_to_come_is_of_before_the_machine_was_started(places: tuple[Place, Place]) -> None:
    old, new = places
    later_s = time.monotonic() + 1000
    new.take(later_s)
    assert not old.is_lost(5.0)
    old.take(5.0)
    assert new.is_lost(4.0)
