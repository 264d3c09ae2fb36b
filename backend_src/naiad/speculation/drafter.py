"""What every source of draft tokens looks like."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Protocol

from naiad.sequence import Sequence

# A drafter that reads the text takes in so many tokens a call at most: a long prompt must not
# hold up the other sequences of a step.
MAX_READ_TOKENS = 4096


class Drafter(Protocol):
    """Guesses how sequences go on; what it knows of a sequence is kept from call to call.

    State is made by a sequence's first `propose` and gone after `forget`. Between the two the
    sequence's `token_ids` only grow, and they hold no draft: preemption takes blocks, not tokens.

    Attributes:
        needs_hidden_states: whether it drafts from what the target computed (heads: Medusa,
            EAGLE) instead of from token ids alone. Such a drafter has to be handed the target's
            last hidden states of the tokens verified since its last `propose`, before the next.
            No drafter here needs them, and no engine hands them over.
        is_free: whether a draft costs next to nothing. It is then made first and cut to what
            pays; one that costs passes of a model is asked only for what will be used.
    """

    needs_hidden_states: ClassVar[bool]
    is_free: ClassVar[bool]

    @property
    def num_failures(self) -> int:
        """How often it could not draft because something was wrong with it."""

    def num_unread(self, sequence: Sequence) -> int | None:
        """Known tokens but the last that it has to read before it can draft; what that costs counts.

        None: it has no draft for the sequence now.
        """

    def propose(self, sequences: list[Sequence], num_tokens: list[int]) -> list[list[int]]:
        """Of each sequence at most so many ids that may follow its known tokens, the first one first.

        May be empty: no guess, or not all known tokens are taken in yet (`MAX_READ_TOKENS`, or a
        bound of its own).
        """

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended, whatever the reason: give back all that is kept for it.

        Its tokens are final. It need never have been seen before.
        """


class TextDrafter(ABC):
    """A free `Drafter`: guesses for one sequence after the other, from text alone."""

    needs_hidden_states: ClassVar[bool] = False
    is_free: ClassVar[bool] = True
    num_failures = 0

    @abstractmethod
    def guess(self, sequence: Sequence, num_tokens: int) -> list[int]:
        """At most `num_tokens` ids that may follow the known tokens; see `Drafter.propose`.

        With `num_tokens` = 0 tokens are only taken in, as may be done while a prompt is computed.
        """

    @abstractmethod
    def forget(self, sequence: Sequence) -> None:
        """See `Drafter`."""

    def num_unread(self, sequence: Sequence) -> int | None:
        """See `Drafter`: reading is free."""
        return 0

    def propose(self, sequences: list[Sequence], num_tokens: list[int]) -> list[list[int]]:
        """See `Drafter`."""
        return [self.guess(sequence, num) for sequence, num in zip(sequences, num_tokens, strict=True)]
