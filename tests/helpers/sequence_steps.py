"""Steps of sequences that a test advances by hand, without a scheduler."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from naiad.model_runner.lone_steps import LoneRow, lone_step
from naiad.outputs import StepBatch
from naiad.sequence import UNKNOWN_TOKEN, Sequence


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
            next_token_id=_next_token_id(row),
        )
        for row in rows
    )


def _next_token_id(row: SequenceRow) -> int:
    """The prompt token after the row, if the prompt's log-probabilities are requested."""
    sequence, end = row.sequence, row.start + row.num_scheduled_tokens - len(row.draft_token_ids)
    is_needed = sequence.params.num_prompt_log_probs >= 0 and end < sequence.num_prompt_tokens
    return sequence.token_ids[end] if is_needed else UNKNOWN_TOKEN
