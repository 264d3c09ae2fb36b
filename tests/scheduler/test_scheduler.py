from __future__ import annotations

from helpers.invariants import check_invariants
from naiad.errors import InternalError
from naiad.kv_cache.kv_cache_manager import KVCacheManager
from naiad.outputs import ModelOutput, StepBatch
from naiad.scheduler.scheduler import Scheduler
from naiad.scheduler.step_budget import SchedulerLimits
from naiad.sequence import SamplingParams, Sequence, SequenceStatus

BLOCK_SIZE = 4


def make_scheduler(num_blocks: int = 64, max_num_seqs: int = 8, budget: int = 32) -> Scheduler:
    return Scheduler(KVCacheManager(num_blocks, BLOCK_SIZE), SchedulerLimits(max_num_seqs, budget))


def add(scheduler: Scheduler, sequence_id: int, num_tokens: int) -> Sequence:
    sequence = Sequence(
        sequence_id=sequence_id,
        token_ids=list(range(num_tokens)),
        num_prompt_tokens=num_tokens,
        params=SamplingParams(max_tokens=1000),
        arrival_s=float(sequence_id),
    )
    scheduler.add(sequence)
    return sequence


def step(scheduler: Scheduler) -> StepBatch:
    """Schedule a step and update with the result that every sampled token is 7."""
    step = scheduler.schedule()
    check_invariants(scheduler, step)
    sampled = {row.sequence_id: [7] for row in step.rows if row.samples}
    scheduler.update(step, ModelOutput(sampled))
    check_invariants(scheduler)
    return step


def shape(step: StepBatch) -> list[tuple[int, int, bool]]:
    return [(row.sequence_id, row.num_scheduled_tokens, row.samples) for row in step.rows]


def test_long_prompt_is_cut_into_budgets() -> None:
    scheduler = make_scheduler(budget=10)
    add(scheduler, 1, 25)
    assert [shape(step(scheduler)) for _ in range(4)] == [
        [(1, 10, False)],
        [(1, 10, False)],
        [(1, 5, True)],
        [(1, 1, True)],
    ]


def test_single_tokens_come_before_a_long_prompt() -> None:
    scheduler = make_scheduler(budget=6)
    add(scheduler, 1, 20)
    add(scheduler, 2, 2)
    for _ in range(3):
        step(scheduler)
    # Sequence 1 has two tokens left and leaves room for sequence 2.
    assert shape(step(scheduler)) == [(1, 2, True), (2, 2, True)]
    add(scheduler, 3, 20)
    assert shape(step(scheduler)) == [(1, 1, True), (2, 1, True), (3, 4, False)]
    assert shape(step(scheduler)) == [(1, 1, True), (2, 1, True), (3, 4, False)]


def test_slots_bound_who_runs() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    for sequence_id in (1, 2, 3):
        add(scheduler, sequence_id, 2)
    assert [row[0] for row in shape(step(scheduler))] == [1, 2]
    assert len(scheduler.waiting) == 1


def test_admission_needs_blocks_for_the_whole_prompt() -> None:
    scheduler = make_scheduler(num_blocks=4, budget=4)
    add(scheduler, 1, 4)
    add(scheduler, 2, 16)
    assert [row[0] for row in shape(step(scheduler))] == [1]
    assert [row[0] for row in shape(step(scheduler))] == [1]


def test_nobody_overtakes_the_first_in_the_queue() -> None:
    scheduler = make_scheduler(num_blocks=4)
    add(scheduler, 1, 4)
    add(scheduler, 2, 16)
    add(scheduler, 3, 1)
    assert [row[0] for row in shape(step(scheduler))] == [1]


def test_youngest_is_preempted_and_comes_back_first() -> None:
    scheduler = make_scheduler(num_blocks=4)
    first, second = add(scheduler, 1, 8), add(scheduler, 2, 8)
    third = add(scheduler, 3, 1)
    step(scheduler)
    assert shape(step(scheduler)) == [(1, 1, True)]
    assert second.status is SequenceStatus.WAITING
    assert (second.num_computed_tokens, second.num_tokens, second.num_preemptions) == (0, 9, 1)
    assert list(scheduler.waiting) == [second, third]
    scheduler.remove(first)
    assert shape(step(scheduler)) == [(2, 9, True), (3, 1, True)]


def test_a_sequence_can_preempt_itself() -> None:
    scheduler = make_scheduler(num_blocks=4)
    add(scheduler, 1, 7)
    second = add(scheduler, 2, 8)
    step(scheduler)
    assert shape(step(scheduler)) == [(1, 1, True)]
    assert second.status is SequenceStatus.WAITING


def test_remove_frees_running_and_waiting() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    running, waiting = add(scheduler, 1, 8), add(scheduler, 2, 8)
    step(scheduler)
    scheduler.remove(waiting)
    scheduler.remove(running)
    assert not scheduler.has_work
    assert scheduler.kv_cache.num_used_blocks == 0
    assert {running.status, waiting.status} == {SequenceStatus.FINISHED}


def test_failed_row_is_not_booked() -> None:
    scheduler = make_scheduler()
    failed, other = add(scheduler, 1, 3), add(scheduler, 2, 3)
    scheduler.update(scheduler.schedule(), ModelOutput({2: [7]}, {1: InternalError("broken")}))
    assert (failed.num_computed_tokens, failed.num_tokens) == (0, 3)
    assert (other.num_computed_tokens, other.num_tokens) == (3, 4)
