from __future__ import annotations

from itertools import pairwise

from naiad.triton_server.service.check_rounds import ROUND_S, CheckRounds


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_each_sequence_is_asked_for_once_in_a_round() -> None:
    rounds = CheckRounds(Clock())
    assert [rounds.is_due(number) for number in (1, 2, 1, 2, 3)] == [True, True, False, False, True]


def test_the_first_chunk_of_the_next_round_asks() -> None:
    clock = Clock()
    rounds = CheckRounds(clock)
    assert rounds.is_due(1)
    clock.now_s += ROUND_S
    assert rounds.is_due(1)
    assert not rounds.is_due(1)


def test_a_sequence_is_not_left_unasked_for_longer_than_a_round_and_a_chunk() -> None:
    clock, gap_s = Clock(), 0.007
    rounds = CheckRounds(clock)
    asked_s = []
    for _ in range(1000):
        if rounds.is_due(1):
            asked_s.append(clock.now_s)
        clock.now_s += gap_s
    assert max(b - a for a, b in pairwise(asked_s)) < ROUND_S + gap_s
    assert len(asked_s) < 1000 * gap_s / ROUND_S + 1


def test_what_was_asked_is_forgotten_with_its_round() -> None:
    clock = Clock()
    rounds = CheckRounds(clock)
    for number in range(1000):
        rounds.is_due(number)
    clock.now_s += ROUND_S
    rounds.is_due(1)
    assert rounds._asked == {1}
