from __future__ import annotations

from helpers.invariants import check_invariants
from helpers.scheduler_desk import Desk
from naiad.scheduler.step_budget import SchedulerLimits


def test_prompts_with_a_common_beginning_share_it_in_the_same_step() -> None:
    desk = Desk(budget=64)
    for last in range(4):
        sequence = desk.add(num_tokens=17, first_id=0)
        sequence.token_ids[-1] = 500 + last
    assert desk.step() == [(1, 17), (2, 1), (3, 1), (4, 1)]


def test_siblings_wait_for_the_prompt_and_copy_only_its_last_block() -> None:
    desk = Desk(budget=4)
    first = desk.add(num_tokens=10)
    siblings = [desk.add(num_tokens=10, first_id=1000, donor=first) for _ in range(2)]
    assert desk.step() == [(1, 4)]
    assert desk.step() == [(1, 4)]
    assert desk.step() == [(1, 2)]
    batch = desk.scheduler.schedule()
    check_invariants(desk.scheduler, batch)
    assert [(row.sequence_id, row.start) for row in batch.rows] == [(1, 10), (2, 9), (3, 9)]
    assert batch.block_copies == [[(first.block_table[2], each.block_table[2]) for each in siblings]]
    desk.book(batch)


def test_siblings_of_one_that_has_ended_start_from_the_cache() -> None:
    desk = Desk(max_num_seqs=1)
    first = desk.add(num_tokens=10)
    desk.add(num_tokens=10, first_id=1000, donor=first)
    desk.step()
    desk.scheduler.remove(first)
    assert desk.step() == [(2, 2)]


def test_siblings_do_not_hold_up_those_behind_them_while_the_prompt_is_computed() -> None:
    desk = Desk(budget=4)
    first = desk.add(num_tokens=12)
    desk.add(num_tokens=12, first_id=1000, donor=first)
    desk.step()
    desk.add(num_tokens=2, priority=-1)
    assert [row[0] for row in desk.step()] == [1]
    assert [row[0] for row in desk.step()] == [1]
    assert [row[0] for row in desk.step()] == [1, 2, 3]


def test_a_sibling_waits_for_what_its_donor_has_from_the_step_that_is_being_made() -> None:
    desk = Desk(num_blocks=8)
    first = desk.add(num_tokens=7, first_id=1000)
    sibling = desk.add(num_tokens=7, first_id=1000, donor=first)
    desk.scheduler.limits = SchedulerLimits(1, 32)
    desk.step()
    desk.scheduler._preempt(first)
    desk.scheduler.limits = SchedulerLimits(8, 32)
    desk.step()
    # The donor's blocks are still cached; its last block must not be copied before it is computed.
    assert sibling.num_computed_tokens == 0
    batch = desk.scheduler.schedule()
    assert batch.block_copies == [[(first.block_table[1], sibling.block_table[1])]]
    desk.book(batch)
