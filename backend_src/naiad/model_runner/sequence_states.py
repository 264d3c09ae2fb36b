"""The state that a runner keeps of each sequence between steps: block tables and sampling state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from naiad.outputs import Admission, StepBatch, StepRow
from naiad.sampling.row_state import RowState
from naiad.sequence import SamplingParams


class RowMaker(Protocol):
    """Makes the sampling state of sequences, such as `Sampler`."""

    def new_row(self, sequence_id: int, params: SamplingParams, num_prompt_tokens: int) -> RowState:
        """Return the state of a sequence without known tokens."""


class SequenceState:
    """The runner's state of one sequence.

    Attributes:
        sampling: the sampler's state of the sequence.
        block_tables: for each of the model's groups of layers, the sequence's blocks.
    """

    __slots__ = ("_kv_tables", "block_tables", "sampling")

    def __init__(self, sampling: RowState, kv_groups: Sequence[int]) -> None:
        """Start without blocks.

        Args:
            sampling: the sampler's state of the sequence.
            kv_groups: for each of the model's groups of layers, the KV group whose blocks it uses.
        """
        self.sampling = sampling
        self._kv_tables: list[list[int]] = [[] for _ in range(1 + max(kv_groups))]
        self.block_tables = [self._kv_tables[group] for group in kv_groups]

    def advance(self, row: StepRow) -> None:
        """Apply a row: its block changes and its new known tokens."""
        if row.block_changes:
            changes = row.block_changes
            if len(changes) == 1:
                changes *= len(self._kv_tables)
            # A draft model may have fewer groups than the served model.
            for table, change in zip(self._kv_tables, changes, strict=False):
                table[change.first :] = change.block_ids
        sampling = self.sampling
        if row.earlier_token_ids:
            assert sampling.num_tokens + len(row.earlier_token_ids) == row.start, "tokens are missing"
            sampling.advance(row.earlier_token_ids)
        num_known = sampling.num_tokens - row.start
        assert num_known >= 0, "a row starts after what is known of its sequence"
        # A clone may already know the tokens that it computes again.
        sampling.advance(row.token_ids[num_known:] if num_known else row.token_ids)


class StateRow(NamedTuple):
    """A row of a step and its sequence's state, to which the row has been applied."""

    row: StepRow
    state: SequenceState


class SequenceStates:
    """The states of all sequences that have been admitted and have not ended."""

    def __init__(self, sampler: RowMaker, kv_groups: Sequence[int] = (0,)) -> None:
        """Start without sequences.

        Args:
            sampler: makes the sampling state of new sequences.
            kv_groups: for each of the model's groups of layers, the KV group whose blocks it uses.
        """
        self._sampler = sampler
        self._kv_groups = kv_groups
        self._states: dict[int, SequenceState] = {}

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self._states)

    def take(self, step: StepBatch) -> list[StateRow]:
        """Apply a step: drop ended sequences, admit new ones, and apply the rows."""
        for sequence_id in step.ended:
            # The id is missing if an earlier step raised before it was applied.
            self._states.pop(sequence_id, None)
        for admission in step.admissions:
            self._states[admission.sequence_id] = self._admitted(admission)
        rows = []
        for row in step.rows:
            state = self._states[row.sequence_id]
            state.advance(row)
            rows.append(StateRow(row, state))
        return rows

    def clear(self) -> None:
        """Drop all sequences."""
        self._states.clear()

    def _admitted(self, admission: Admission) -> SequenceState:
        sequence_id, params = admission.sequence_id, admission.params
        if admission.clone_of is None:
            row = self._sampler.new_row(sequence_id, params, admission.num_prompt_tokens)
            return SequenceState(row, self._kv_groups)
        donor = self._states[admission.clone_of]
        # Its block tables differ from the donor's; they come with its first row.
        return SequenceState(donor.sampling.clone(sequence_id, params), self._kv_groups)
