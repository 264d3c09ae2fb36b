"""Steps that are made while the last one is under way, so that a device never waits for the host.

What a step leaves behind is known before it is computed, but for the ids it samples: unless one of
them ends its sequence, each has a token more. So the next step is made as if that had happened, and
then all of it is taken back, until the ids are there. Who has ended by then has a row too many in the
next step: nobody sees what it gives, and its blocks are its own until that step is over.

Nobody gives way in a step that is made ahead: blocks of a row under way are not free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from naiad.outputs import ScheduledSequence
from naiad.scheduler.preemption import SchedulerState, all_wait, choose_for_first
from naiad.sequence import UNKNOWN_TOKEN, Sequence, SequenceStatus
from naiad.speculation.speculator import Speculator


def can_be_foreseen(rows: Iterable[ScheduledSequence], speculator: Speculator | None) -> bool:
    """Whether the step behind these rows can be made without their ids.

    Where it can not for one of them it is not made for the others either: each would get a token only
    in every second step.
    """
    return all(
        row.sequence.runs_ahead and (speculator is None or not speculator.may_draft(row.sequence))
        for row in rows
        if row.sequence.status is SequenceStatus.RUNNING
    )


def can_step(state: SchedulerState, first_waiting: Callable[[], Sequence | None]) -> bool:
    """Whether a step can be made of what is foreseen: some go on, and nobody has to give way.

    Args:
        state: all that run get the blocks they will need, as far as there are any.
        first_waiting: who is admitted next, once they have them.
    """
    running = state.running
    if all_wait(running) or not all(state.kv_cache.allocate(each, each.num_tokens) for each in running):
        return False
    first = first_waiting()
    return first is None or not choose_for_first(state, first)


@contextmanager
def foreseen(rows: Iterable[ScheduledSequence]) -> Iterator[None]:
    """Let sequences be what they will be when their rows are computed, if no token ends one.

    Those that will be as long as they may are not foreseen to go on: they miss no token.
    """
    live = [row for row in rows if row.sequence.status is SequenceStatus.RUNNING]
    going_on = [
        row.sequence.token_ids
        for row in live
        if row.samples and row.sequence.num_output_tokens + 1 < row.sequence.params.max_tokens
    ]
    for row in live:
        row.sequence.num_computed_tokens += row.num_scheduled_tokens
    for token_ids in going_on:
        token_ids.append(UNKNOWN_TOKEN)
    try:
        yield
    finally:
        for token_ids in going_on:
            token_ids.pop()
        for row in live:
            row.sequence.num_computed_tokens -= row.num_scheduled_tokens
