"""Turns of the event loop: whose work comes when."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from naiad.gate.turns import TURN_BYTES, Turns


@dataclass(eq=False)
class Worker:
    """Has pieces of work of one size, and notes each of them."""

    turns: Turns
    done: list[str]
    name: str
    num_pieces: int
    size: int

    def go_on(self) -> None:
        self.turns.spend(self.size)
        self.done.append(self.name)
        self.num_pieces -= 1
        if self.num_pieces:
            self.turns.postpone(self)


def test_those_who_have_much_work_take_turns() -> None:
    async def work() -> None:
        turns, done = Turns(), list[str]()
        first = Worker(turns, done, "a", 3, TURN_BYTES)
        second = Worker(turns, done, "b", 1, TURN_BYTES)
        gone = Worker(turns, done, "c", 1, TURN_BYTES)
        for worker in (first, second, gone):
            turns.postpone(worker)
        turns.forget(gone)
        num_done = []
        while first.num_pieces:
            await asyncio.sleep(0)
            num_done.append(len(done))
        assert done == ["a", "b", "a", "a"]
        assert num_done == [1, 2, 3, 4], "one piece fills a turn"

    asyncio.run(work())


def test_small_work_of_all_fits_into_a_turn() -> None:
    async def work() -> None:
        turns, done = Turns(), list[str]()
        for name in "abc":
            turns.postpone(Worker(turns, done, name, 1, 100))
        await asyncio.sleep(0)
        assert (done, turns.is_over) == (["a", "b", "c"], False)

    asyncio.run(work())


def test_a_turn_is_over_until_the_loop_comes_round() -> None:
    async def work() -> None:
        turns = Turns()
        turns.spend(TURN_BYTES)
        assert turns.is_over
        await asyncio.sleep(0)
        assert not turns.is_over

    asyncio.run(work())
