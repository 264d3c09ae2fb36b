"""Data sent to the model runner: everything once, and again only after a preemption."""

from __future__ import annotations

from helpers.scheduler_desk import Desk
from naiad.outputs import Admission, StepBatch


def next_step(desk: Desk) -> StepBatch:
    batch = desk.scheduler.schedule()
    desk.book(batch)
    return batch


def test_parameters_come_once_and_blocks_when_they_are_new() -> None:
    desk = Desk()
    sequence = desk.add(num_tokens=6)
    batches = [next_step(desk) for _ in range(4)]
    assert batches[0].admissions == [Admission(1, sequence.params, 6)]
    assert [batch.admissions for batch in batches[1:]] == [[]] * 3
    changes = [batch.rows[0].block_changes for batch in batches]
    # The prompt fills a block and a half; the third block is added with the ninth token.
    assert [[change.first for change in each] for each in changes] == [[0], [], [], [2]]
    assert [row.token_ids for batch in batches[1:] for row in batch.rows] == [[7]] * 3


def test_a_prefix_hit_brings_the_tokens_before_its_row() -> None:
    desk = Desk()
    desk.add(num_tokens=10, first_id=0)
    next_step(desk)
    desk.add(num_tokens=10, first_id=0)
    row = next_step(desk).rows[1]
    assert (row.start, row.token_ids, row.earlier_token_ids) == (8, [8, 9], tuple(range(8)))


def test_a_preempted_sequence_is_forgotten_and_admitted_anew() -> None:
    desk = Desk(num_blocks=8)
    sequence = desk.add(num_tokens=6)
    next_step(desk)
    desk.scheduler._preempt(sequence)
    batch = next_step(desk)
    assert (batch.ended, [each.sequence_id for each in batch.admissions]) == ([1], [1])
    (row,) = batch.rows
    assert [*row.earlier_token_ids, *row.token_ids] == sequence.token_ids[:-1]
    assert row.block_changes[0].first == 0


def test_what_has_ended_is_told_with_the_next_step_that_has_rows() -> None:
    desk = Desk()
    sequence = desk.add()
    next_step(desk)
    desk.scheduler.remove(sequence)
    assert next_step(desk) == StepBatch()
    desk.add()
    assert next_step(desk).ended == [1]


def test_a_sibling_begins_as_a_clone_of_the_first() -> None:
    desk = Desk()
    first = desk.add(num_tokens=6, first_id=1000)
    desk.add(num_tokens=6, first_id=1000, donor=first)
    next_step(desk)
    batch = next_step(desk)
    assert [each.clone_of for each in batch.admissions] == [1]
    assert batch.rows[1].earlier_token_ids == ()
