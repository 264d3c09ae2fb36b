"""Steps made without a scheduler, for measurements and rehearsals at startup and for tests."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from naiad.outputs import Admission, BlockChange, StepBatch, StepRow
from naiad.sequence import UNKNOWN_TOKEN, SamplingParams


@dataclass(frozen=True, slots=True)
class LoneRow:
    """A row with everything that a runner needs of its sequence.

    Attributes:
        sequence_id: unique within the step.
        token_ids: the known tokens up to the row's last.
        start: the position of the row's first token.
        block_table: covers every token, drafts included; used for every KV group.
        params: how the sequence is sampled.
        samples: whether a new token is sampled.
        draft_token_ids: the draft tokens after the known ones.
        num_prompt_tokens: None: all known tokens belong to the prompt.
        next_token_id: the prompt token after the row; see `StepRow`.
    """

    sequence_id: int
    token_ids: list[int]
    start: int
    block_table: list[int]
    params: SamplingParams
    samples: bool = True
    draft_token_ids: tuple[int, ...] = ()
    num_prompt_tokens: int | None = None
    next_token_id: int = UNKNOWN_TOKEN


def lone_step(rows: Iterable[LoneRow], is_projected: bool = False) -> StepBatch:
    """Make a step that depends on no earlier one: it admits all its sequences."""
    step = StepBatch(is_projected=is_projected)
    for row in rows:
        num_prompt_tokens = len(row.token_ids) if row.num_prompt_tokens is None else row.num_prompt_tokens
        step.admissions.append(Admission(row.sequence_id, row.params, num_prompt_tokens))
        step.rows.append(
            StepRow(
                row.sequence_id,
                row.start,
                row.token_ids[row.start :],
                row.samples,
                row.draft_token_ids,
                tuple(row.token_ids[: row.start]),
                (BlockChange(0, row.block_table),),
                row.next_token_id,
            )
        )
    return step
