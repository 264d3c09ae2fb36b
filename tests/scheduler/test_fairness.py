"""Priorities, tenants and siblings: who runs, who gives way."""

from __future__ import annotations

from naiad.kv_cache.kv_cache_manager import KVCacheManager
from naiad.kv_cache.prefix_cache import PrefixCache
from naiad.outputs import ModelOutput, SchedulerOutput
from naiad.scheduler.invariants import check_invariants
from naiad.scheduler.policies import PriorityFirst, SchedulingPolicy, ShortestPromptFirst
from naiad.scheduler.scheduler import Scheduler
from naiad.scheduler.step_budget import SchedulerLimits
from naiad.sequence import SamplingParams, Sequence, SequenceStatus

BLOCK_SIZE = 4


class Desk:
    """A scheduler whose every sampled token is 7."""

    def __init__(
        self,
        num_blocks: int = 64,
        max_num_seqs: int = 8,
        budget: int = 32,
        policy: SchedulingPolicy | None = None,
    ) -> None:
        kv_cache = KVCacheManager(num_blocks, BLOCK_SIZE, PrefixCache(BLOCK_SIZE))
        self.scheduler = Scheduler(kv_cache, SchedulerLimits(max_num_seqs, budget), policy)
        self.num_added = 0

    def add(
        self,
        num_tokens: int = 2,
        priority: int = 0,
        salt: str = "",
        first_id: int | None = None,
        donor: Sequence | None = None,
    ) -> Sequence:
        self.num_added += 1
        start = 1000 * self.num_added if first_id is None else first_id
        sequence = Sequence(
            sequence_id=self.num_added,
            token_ids=list(range(start, start + num_tokens)),
            num_prompt_tokens=num_tokens,
            params=SamplingParams(max_tokens=1000, priority=priority),
            arrival_s=donor.arrival_s if donor else float(self.num_added),
            cache_salt=salt,
            donor=donor,
        )
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> list[tuple[int, int]]:
        """One step; (sequence id, tokens) of its rows."""
        scheduled = self.scheduler.schedule()
        check_invariants(self.scheduler, scheduled)
        self.book(scheduled)
        return [(row.sequence.sequence_id, row.num_scheduled_tokens) for row in scheduled.scheduled]

    def book(self, scheduled: SchedulerOutput) -> None:
        sampled = {row.sequence.sequence_id: [7] for row in scheduled.scheduled if row.samples}
        self.scheduler.update(scheduled, ModelOutput(sampled))
        check_invariants(self.scheduler)

    def running(self) -> list[int]:
        return [sequence.sequence_id for sequence in self.scheduler.running]


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
    # 9 prompt tokens and one more: two blocks of four are still there.
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
    # One unit is worth 2.5 s: those that came 1 and 2 s later overtake it, the next do not.
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


def test_tenants_take_turns() -> None:
    desk = Desk(budget=4)
    for _ in range(4):
        desk.add(num_tokens=4, salt="flood")
    desk.add(num_tokens=4, salt="other")
    assert desk.step() + desk.step() == [(5, 4), (5, 1), (1, 3)]


def test_a_flood_gives_slots_to_another_tenant_and_keeps_its_share() -> None:
    desk = Desk(max_num_seqs=4)
    for _ in range(8):
        desk.add(salt="flood")
    desk.step()
    assert desk.running() == [1, 2, 3, 4]
    for _ in range(3):
        desk.add(salt="other")
    for _ in range(6):
        desk.step()
    assert sorted(desk.running()) == [1, 2, 9, 10]


def test_who_comes_beside_a_flood_runs_in_the_next_step_and_the_flood_keeps_to_its_share_in_it() -> None:
    desk = Desk(max_num_seqs=4)
    for _ in range(8):
        desk.add(num_tokens=4, salt="flood")
    desk.step()
    desk.add(num_tokens=6, salt="quiet")
    # The fourth has lost its slot, the third waits for a step.
    assert desk.step() == [(1, 1), (2, 1), (9, 6)]
    assert [row[0] for row in desk.step()] == [1, 2, 3, 9]


def test_a_flood_keeps_all_its_rows_beside_one_that_does_not_fit() -> None:
    desk = Desk(num_blocks=8, max_num_seqs=4)
    for _ in range(2):
        desk.add(num_tokens=9, salt="flood")
    desk.add(num_tokens=3, salt="other")
    desk.step()
    desk.add(num_tokens=28, salt="quiet")
    assert [row[0] for row in desk.step()] == [1, 2, 3]


def test_a_flood_gives_blocks_to_another_tenant() -> None:
    desk = Desk(num_blocks=8, max_num_seqs=4)
    for _ in range(4):
        desk.add(num_tokens=7, salt="flood")
    desk.step()
    desk.add(num_tokens=8, salt="other")
    desk.step()
    assert 5 in desk.running()


def test_a_tenant_that_comes_back_has_saved_nothing_up() -> None:
    desk = Desk(budget=8, max_num_seqs=2)
    first = desk.add(num_tokens=30, salt="a")
    gone = desk.add(salt="b")
    for _ in range(4):
        desk.step()
    desk.scheduler.remove(gone)
    desk.add(salt="b")
    tenants = desk.scheduler.tenants
    assert tenants.of(first).num_served_tokens == tenants.of(desk.scheduler.waiting.first()).num_served_tokens


def test_blocks_are_taken_from_the_tenant_that_has_more_than_its_share() -> None:
    desk = Desk(num_blocks=4, max_num_seqs=2)
    for _ in range(2):
        desk.add(num_tokens=3, salt="many")
    desk.step()
    desk.scheduler.limits = SchedulerLimits(4, 32)
    desk.add(num_tokens=3, salt="one")
    while desk.scheduler.num_preemptions == 0:
        desk.step()
    assert 3 in desk.running()
    assert 1 in desk.running()


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
    scheduled = desk.scheduler.schedule()
    check_invariants(desk.scheduler, scheduled)
    assert [(row.sequence.sequence_id, row.start) for row in scheduled.scheduled] == [(1, 10), (2, 9), (3, 9)]
    assert scheduled.block_copies == [(first.block_table[2], each.block_table[2]) for each in siblings]
    desk.book(scheduled)


def test_siblings_of_one_that_has_ended_start_from_the_cache() -> None:
    desk = Desk(max_num_seqs=1)
    first = desk.add(num_tokens=10)
    desk.add(num_tokens=10, first_id=1000, donor=first)
    desk.step()
    desk.scheduler.remove(first)
    assert desk.step() == [(2, 2)]


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
    # Two blocks are free and it needs two, but then the second could not go on.
    desk.step()
    assert desk.running() == [2]
    desk.scheduler.remove(second)
    desk.step()
    assert desk.running() == [3]
