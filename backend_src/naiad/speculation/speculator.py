"""Chooses the draft tokens of each step and records how many were accepted."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

from naiad.sequence import Sequence
from naiad.speculation.drafter import MAX_IN_STEP, CostlyDrafter, Drafter
from naiad.speculation.grammar_guides import GrammarGuides
from naiad.speculation.policy import AcceptanceState, DraftRow, SpeculationPolicy

# Free drafters take some time for each sequence. If a step has at least `_CROWD` sequences and none of
# their drafts pays, the drafter is skipped in the next `_REST` steps, and in twice as many each time that
# this happens again, up to `_LONGEST_REST`. A draft model is skipped likewise while the step stays the same
# and the model is too far behind each of its sequences.
_CROWD, _REST, _LONGEST_REST = 8, 7, 63
# The record of a draft model before its first window: three of four tokens were accepted. Only users who
# expect this configure one, and with less it would never be asked where its passes are dear.
_MODEL = (20.0, 15.0)
# One of so many sequences begins with that record whatever the model has been worth since.
_HOPEFUL = 32
# The record of forced drafts before the first one: as if 19 of 20 tokens had been accepted.
_FORCED = (20.0, 19.0)


@dataclass(slots=True)
class DraftTotals:
    """Totals over all sequences so far.

    Attributes:
        num_drafts: number of rows with draft tokens.
        num_draft_tokens: number of draft tokens.
        accepted_at: number of accepted tokens by their place in the draft.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    accepted_at: list[int] = field(default_factory=list)


class Speculator:
    """Combines a drafter, the clients' own guesses, and the policy that decides how many tokens pay."""

    def __init__(
        self, drafter: Drafter | None, policy: SpeculationPolicy, num_speculative_tokens: int
    ) -> None:
        """Start without sequences.

        Args:
            drafter: None: only the clients' guesses are tried.
            policy: distributes a step's draft tokens.
            num_speculative_tokens: maximum number of draft tokens of a sequence in a step.
        """
        self._drafter = drafter
        self._policy = policy
        self._num_speculative_tokens = num_speculative_tokens
        self._states: dict[int, AcceptanceState] = {}
        # Guesses at forced text are judged apart from others: they are nearly always right.
        self._forced_states: dict[int, AcceptanceState] = {}
        self._has_forced: set[int] = set()
        # Of all sequences together; and the sequences that have drafts of the model now.
        self._of_model = AcceptanceState(*_MODEL)
        self._from_model: set[int] = set()
        self._num_begun = 0
        self._guides = GrammarGuides()
        # In this many further steps the drafter is skipped: a free one with at least `_crowd` sequences, a
        # model with the same sequences and number of tokens.
        self._num_resting, self._crowd, self._next_rest = 0, 0, _REST
        self._resting_step: tuple[list[int], int] = ([], 0)
        self.totals = DraftTotals(accepted_at=[0] * num_speculative_tokens)

    @property
    def num_failures(self) -> int:
        """How often the drafter failed."""
        return 0 if self._drafter is None else self._drafter.num_failures

    @property
    def takes_blocks(self) -> bool:
        """Whether the drafter takes blocks and may then draft nothing, as a draft model does."""
        return self._drafter is not None and not self._drafter.is_free

    def may_draft(self, sequence: Sequence) -> bool:
        """Whether it may get drafts: from the drafter, from its client's guess or because of its grammar."""
        has_source = self._drafter is not None or sequence.offered_token_ids or sequence.grammar is not None
        return bool(has_source) and self._ceiling(sequence) > 0

    def drafts(
        self, sequences: list[Sequence], num_left: list[int], num_room: int, num_step_tokens: int
    ) -> list[list[int]]:
        """Return each sequence's draft tokens for the step that is being made.

        Args:
            sequences: sequences whose next token is sampled in this step.
            num_left: for each, how many tokens may follow that token.
            num_room: number of draft tokens for which the step has room.
            num_step_tokens: number of tokens of the whole step, without drafts.
        """
        wanted = [
            min(self._ceiling(sequence), left, num_room)
            for sequence, left in zip(sequences, num_left, strict=True)
        ]
        drafts = [self._given(sequence, num) for sequence, num in zip(sequences, wanted, strict=True)]
        without = [index for index, draft in enumerate(drafts) if wanted[index] > 0 and not draft]
        drafter = self._drafter
        is_free = drafter is None or drafter.is_free
        step = ([], 0) if is_free else ([each.sequence_id for each in sequences], num_step_tokens)
        is_asked = drafter is not None and not self._rests(len(sequences), step)
        if not is_free and not is_asked:
            for index in without:
                self._state_of(sequences[index]).fade()
        if drafter is not None and is_asked and is_free:
            self._propose(drafter, sequences, wanted, without, drafts)
        model = cast(CostlyDrafter, drafter) if is_asked and not is_free else None
        if not any(drafts) and model is None:
            return drafts
        rows = [self._row(sequence, draft) for sequence, draft in zip(sequences, drafts, strict=True)]
        if model is not None:
            for index in without:
                num_unread = model.num_unread(sequences[index])
                if num_unread is not None:
                    rows[index] = rows[index]._replace(
                        num_most=wanted[index], num_unread=num_unread, num_left=num_left[index]
                    )
        counts = self._policy.plan(rows, num_step_tokens, num_room)
        if model is not None:
            asked = [index for index in without if counts[index]]
            self._note_unread(step, rows, bool(asked))
            self._from_model = {sequences[index].sequence_id for index in asked}
            self._propose(model, sequences, counts, asked, drafts)
        elif is_asked:
            self._note_crowd(len(sequences), any(counts))
        return [draft[:count] for draft, count in zip(drafts, counts, strict=True)]

    def _row(self, sequence: Sequence, draft: list[int]) -> DraftRow:
        return DraftRow(
            self._state_of(sequence),
            len(draft),
            num_context=sequence.num_tokens,
            is_drawn=sequence.params.temperature > 0 and sequence.params.top_k != 1,
        )

    def _rests(self, num_sequences: int, step: tuple[list[int], int]) -> bool:
        """Whether the drafter is skipped: recently no draft has paid with so many, or these, sequences."""
        if not self._num_resting:
            return False
        if num_sequences < self._crowd or step != self._resting_step:
            self._num_resting = 0
            return False
        self._num_resting -= 1
        return True

    def _note_crowd(self, num_sequences: int, has_paid: bool) -> None:
        """Let the drafter rest if none of the drafts of many sequences pays."""
        if has_paid:
            self._next_rest = _REST
        elif num_sequences >= _CROWD:
            self._crowd = num_sequences
            self._rest()

    def _note_unread(self, step: tuple[list[int], int], rows: list[DraftRow], has_paid: bool) -> None:
        """Let a draft model rest if no row has a draft, and it would have to read too much for each."""
        if has_paid or step != self._resting_step:
            self._next_rest = _REST
        self._resting_step = step
        if not has_paid and all(row.num_unread > MAX_IN_STEP for row in rows):
            self._rest()

    def _rest(self) -> None:
        self._num_resting = self._next_rest
        self._next_rest = min(2 * self._next_rest + 1, _LONGEST_REST)

    def judged(self, sequence: Sequence, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """Record how many of a row's drafts the target accepted."""
        self._state_of(sequence).update(num_draft_tokens, num_accepted_tokens)
        if sequence.sequence_id in self._from_model:
            self._of_model.update(num_draft_tokens, num_accepted_tokens)
        sequence.num_draft_tokens += num_draft_tokens
        sequence.num_accepted_tokens += num_accepted_tokens
        self.totals.num_drafts += 1
        self.totals.num_draft_tokens += num_draft_tokens
        for place in range(num_accepted_tokens):
            self.totals.accepted_at[place] += 1

    def dropped(self, sequence: Sequence, start: int, end: int) -> None:
        """No longer count the accepted drafts at the places [start, end), which are after the text's end."""
        sequence.num_accepted_tokens -= end - start
        for place in range(start, end):
            self.totals.accepted_at[place] -= 1

    def forget(self, sequence: Sequence) -> None:
        """Release the state of a sequence that has ended."""
        self._states.pop(sequence.sequence_id, None)
        self._forced_states.pop(sequence.sequence_id, None)
        self._has_forced.discard(sequence.sequence_id)
        self._guides.forget(sequence)
        if self._drafter is not None:
            self._drafter.forget(sequence)

    def _given(self, sequence: Sequence, num_tokens: int) -> list[int]:
        """The next tokens that the grammar forces, or else those that the client guesses."""
        draft = _offered(sequence, num_tokens)
        self._has_forced.discard(sequence.sequence_id)
        if sequence.grammar is None:
            return draft
        forced = self._guides.forced(sequence, num_tokens)
        if forced:
            self._has_forced.add(sequence.sequence_id)
            return forced
        return self._guides.allowed(sequence, draft)

    def _state_of(self, sequence: Sequence) -> AcceptanceState:
        """The record for the kind of draft that the sequence has now."""
        sequence_id = sequence.sequence_id
        if sequence_id in self._has_forced:
            return self._forced_states.setdefault(sequence_id, AcceptanceState(*_FORCED))
        state = self._states.get(sequence_id)
        if state is None:
            state = self._states[sequence_id] = self._new_state()
        return state

    def _new_state(self) -> AcceptanceState:
        if self._drafter is None or self._drafter.is_free:
            return AcceptanceState()
        rate, hope = self._of_model.rate, AcceptanceState(*_MODEL).rate
        if self._num_begun % _HOPEFUL == 0:
            rate = max(rate, hope)
        self._num_begun += 1
        return AcceptanceState.starting_at(rate)

    def _propose(
        self,
        drafter: Drafter,
        sequences: list[Sequence],
        num_tokens: list[int],
        indices: list[int],
        drafts: list[list[int]],
    ) -> None:
        """Ask the drafter for the drafts of the sequences at `indices` and store them in `drafts`."""
        if not indices:
            return
        made = drafter.propose(
            [sequences[index] for index in indices], [num_tokens[index] for index in indices]
        )
        for index, draft in zip(indices, made, strict=True):
            sequence = sequences[index]
            drafts[index] = draft if sequence.grammar is None else self._guides.allowed(sequence, draft)

    def _ceiling(self, sequence: Sequence) -> int:
        asked = sequence.params.num_draft_tokens
        return self._num_speculative_tokens if asked < 0 else min(asked, self._num_speculative_tokens)


def _offered(sequence: Sequence, num_tokens: int) -> list[int]:
    """The next tokens of the client's guess; none once the output differs from it or is past its end."""
    offered, num_known = sequence.offered_token_ids, sequence.num_output_tokens
    if num_known >= len(offered) or tuple(sequence.output_token_ids) != offered[:num_known]:
        sequence.offered_token_ids = ()
        return []
    if num_tokens <= 0:
        return []
    return list(offered[num_known : num_known + num_tokens])
