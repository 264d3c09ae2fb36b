from __future__ import annotations

from helpers.scheduler_desk import Desk
from naiad.scheduler.policies import PriorityFirst, ShortestPromptFirst
from naiad.sequence import SequenceStatus


def test_smaller_priority_is_admitted_first() -> None:
    desk = Desk(max_num_seqs=1, policy=PriorityFirst(1000.0))
    for priority in (3, 1, 2):
        desk.add(priority=priority)
    order = []
    while desk.scheduler.has_work:
        desk.step()
        order += desk.running()
        desk.scheduler.remove(desk.scheduler.running[0])
    assert order == [2, 3, 1]


def test_smaller_priority_takes_a_slot_and_the_other_comes_back_through_its_own_blocks() -> None:
    desk = Desk(max_num_seqs=1, policy=PriorityFirst(1000.0))
    slow = desk.add(num_tokens=9, priority=1)
    desk.step()
    urgent = desk.add(priority=0)
    assert desk.step() == [(2, 2)]
    assert slow.status is SequenceStatus.WAITING
    desk.scheduler.remove(urgent)
    # 9 prompt tokens and one more: two blocks of four tokens are still cached.
    assert desk.step() == [(1, 2)]


def test_equal_priority_waits_for_a_slot() -> None:
    desk = Desk(max_num_seqs=1, policy=PriorityFirst(1000.0))
    desk.add()
    desk.step()
    desk.add()
    assert desk.step() == [(1, 1)]


def test_smaller_priority_takes_blocks_from_as_few_as_it_needs() -> None:
    desk = Desk(num_blocks=6, policy=PriorityFirst(1000.0))
    for _ in range(3):
        desk.add(num_tokens=7, priority=1)
    desk.step()
    desk.add(num_tokens=8, priority=0)
    desk.step()
    assert desk.running() == [4, 1, 2]


def test_nobody_is_preempted_in_vain() -> None:
    desk = Desk(num_blocks=6, policy=PriorityFirst(1000.0))
    desk.add(num_tokens=15, priority=0)
    desk.add(num_tokens=3, priority=2)
    desk.step()
    desk.add(num_tokens=16, priority=1)
    desk.step()
    assert desk.running() == [1, 2]


def test_aging_lets_the_low_priority_pass_those_who_come_too_late() -> None:
    desk = Desk(max_num_seqs=1, policy=PriorityFirst(aging_s=2.5))
    low = desk.add(priority=1)
    served: list[int] = []
    for _ in range(5):
        desk.add(priority=0)
        desk.step()
        served += desk.running()
        desk.scheduler.remove(desk.scheduler.running[0])
    # One unit is worth 2.5 s: sequences that arrive 1 and 2 s later overtake it, the next do not.
    assert served.index(low.sequence_id) == 2


def test_shortest_prompt_first() -> None:
    desk = Desk(max_num_seqs=1, policy=ShortestPromptFirst(10.0))
    desk.add(num_tokens=9)
    desk.add(num_tokens=3)
    desk.add(num_tokens=5)
    desk.step()
    assert desk.running() == [2]


def test_a_short_urgent_prompt_goes_before_the_rest_of_a_long_one() -> None:
    desk = Desk(budget=4, policy=PriorityFirst(1000.0))
    desk.add(num_tokens=20, priority=1)
    assert desk.step() == [(1, 4)]
    desk.add(num_tokens=3, priority=0)
    assert desk.step() == [(2, 3), (1, 1)]


def test_one_that_was_preempted_comes_back_when_the_others_have_a_block_to_spare() -> None:
    desk = Desk(num_blocks=4)
    first = desk.add(num_tokens=4)
    second = desk.add(num_tokens=3)
    desk.add(num_tokens=4)
    desk.step()
    desk.step()
    assert desk.running() == [1, 2]
    desk.step()
    desk.scheduler.remove(first)
    # Two blocks are free and it needs two, but then the second sequence could not advance.
    desk.step()
    assert desk.running() == [2]
    desk.scheduler.remove(second)
    desk.step()
    assert desk.running() == [3]
