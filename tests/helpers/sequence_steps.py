"""Steps of sequences that a test advances by hand, without a scheduler."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from naiad.model_runner.lone_steps import LoneRow, lone_step
from naiad.outputs import StepBatch
from naiad.sequence import Sequence


@dataclass(frozen=True)
class SequenceRow:
    """Tokens [start, start + num_scheduled_tokens) of a sequence, drafts at the end included."""

    sequence: Sequence
    start: int
    num_scheduled_tokens: int
    samples: bool
    draft_token_ids: tuple[int, ...] = ()

    @property
    def sequence_id(self) -> int:
        return self.sequence.sequence_id


def step_of(rows: Iterable[SequenceRow]) -> StepBatch:
    """A step that admits every sequence, with everything that the runner must know of it."""
    return lone_step(
        LoneRow(
            sequence_id=row.sequence_id,
            token_ids=row.sequence.token_ids[
                : row.start + row.num_scheduled_tokens - len(row.draft_token_ids)
            ],
            start=row.start,
            block_table=row.sequence.block_table,
            params=row.sequence.params,
            samples=row.samples,
            draft_token_ids=row.draft_token_ids,
            num_prompt_tokens=row.sequence.num_prompt_tokens,
        )
        for row in rows
    )
