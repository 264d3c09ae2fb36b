"""Writes a step's rows as data, and tracks what the model runner already has of each sequence."""

from __future__ import annotations

from naiad.outputs import Admission, BlockChange, StepBatch, StepRow
from naiad.sequence import UNKNOWN_TOKEN, Sequence


class StepWriter:
    """Sends the runner the new tokens and blocks of each sequence, and nothing twice.

    A sequence is admitted in the step of its first row, and dropped in the next step after it has ended
    or was preempted. `Sequence.num_sent_tokens` and `Sequence.num_sent_blocks` record what the runner
    has.
    """

    def __init__(self) -> None:
        """Start with a runner that has no sequences."""
        self._ended: list[int] = []
        # Sequences that have their first row in the step that is being made, with that row.
        self._first_rows: list[tuple[Sequence, StepRow]] = []
        # The donors of sequences that start from another one's tokens, until the next step is made.
        self._donors: dict[int, Sequence] = {}

    def row(self, sequence: Sequence, num_tokens: int) -> StepRow:
        """The next known tokens of a sequence as a row; their blocks are already allocated."""
        start = sequence.next_start
        end = start + num_tokens
        token_ids = sequence.token_ids[start:end]
        if len(token_ids) < num_tokens:
            token_ids.append(UNKNOWN_TOKEN)
        row = StepRow(sequence.sequence_id, start, token_ids, end == sequence.next_end)
        if end < sequence.num_prompt_tokens and sequence.params.num_prompt_log_probs >= 0:
            row.next_token_id = sequence.token_ids[end]
        if sequence.num_sent_blocks != len(sequence.block_tables[-1]) or sequence.num_sent_tokens != start:
            self._add_news(sequence, row)
        sequence.num_sent_tokens = end
        return row

    def add_drafts(self, sequence: Sequence, row: StepRow, draft_token_ids: list[int]) -> None:
        """Add drafts to a row; the sequence already has blocks for them."""
        row.draft_token_ids = tuple(draft_token_ids)
        first = row.block_changes[0].first if row.block_changes else sequence.num_sent_blocks
        if len(sequence.block_tables[-1]) > first:
            self._send_blocks(sequence, row, first)

    def trimmed(self, sequence: Sequence) -> None:
        """Note that blocks at the end of the sequence's tables were freed; others may replace them."""
        sequence.num_sent_blocks = min(sequence.num_sent_blocks, len(sequence.block_tables[-1]))

    def clone(self, sequence: Sequence, donor: Sequence) -> None:
        """Note that the sequence starts from the donor's tokens, if it has a row in the next step."""
        self._donors[sequence.sequence_id] = donor

    def forget(self, sequence: Sequence) -> None:
        """Note that the sequence has lost its blocks; when it runs again it is admitted anew."""
        if sequence.num_sent_blocks:
            self._ended.append(sequence.sequence_id)
            sequence.num_sent_blocks = sequence.num_sent_tokens = 0

    def batch(
        self, rows: list[StepRow], copies: list[list[tuple[int, int]]], is_projected: bool
    ) -> StepBatch:
        """The step with these rows. Without rows it is empty, and `ended` ids wait for the next step."""
        if not rows:
            return StepBatch()
        admissions = [self._admission(*first_row, rows) for first_row in self._first_rows]
        ended, self._ended = self._ended, []
        self._first_rows.clear()
        self._donors.clear()
        return StepBatch(ended, admissions, copies, rows, is_projected)

    def _add_news(self, sequence: Sequence, row: StepRow) -> None:
        num_sent_blocks, num_sent_tokens = sequence.num_sent_blocks, sequence.num_sent_tokens
        if num_sent_blocks == 0:
            self._first_rows.append((sequence, row))
        elif num_sent_tokens < row.start:
            row.earlier_token_ids = tuple(sequence.token_ids[num_sent_tokens : row.start])
        if num_sent_blocks != len(sequence.block_tables[-1]):
            self._send_blocks(sequence, row, num_sent_blocks)

    def _send_blocks(self, sequence: Sequence, row: StepRow, first: int) -> None:
        row.block_changes = tuple(BlockChange(first, table[first:]) for table in sequence.block_tables)
        # The last group's table is the shortest; entries of other tables after its end are sent again.
        sequence.num_sent_blocks = len(sequence.block_tables[-1])

    def _admission(self, sequence: Sequence, row: StepRow, rows: list[StepRow]) -> Admission:
        donor = self._donors.get(sequence.sequence_id)
        num_known = 0 if donor is None else self._num_cloned_tokens(sequence, donor, rows)
        if num_known < row.start:
            row.earlier_token_ids = tuple(sequence.token_ids[num_known : row.start])
        clone_of = donor.sequence_id if donor is not None and num_known else None
        return Admission(sequence.sequence_id, sequence.params, sequence.num_prompt_tokens, clone_of)

    def _num_cloned_tokens(self, sequence: Sequence, donor: Sequence, rows: list[StepRow]) -> int:
        """How many tokens the donor's state has before this step; 0 if they do not start the sequence."""
        is_known = donor.num_sent_blocks > 0 and all(each is not donor for each, _ in self._first_rows)
        if not is_known:
            return 0
        num_known = donor.num_sent_tokens
        for row in rows:
            if row.sequence_id == donor.sequence_id:
                num_known = row.start - len(row.earlier_token_ids)
        if num_known > sequence.num_tokens:
            return 0
        return num_known if sequence.token_ids[:num_known] == donor.token_ids[:num_known] else 0
