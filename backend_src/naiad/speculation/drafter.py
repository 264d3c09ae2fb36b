"""What every source of draft tokens looks like."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Protocol

from naiad.config.engine_config import MAX_SPECULATIVE_TOKENS
from naiad.sequence import Sequence

# In one step a drafter that reads the text takes in about this many tokens of texts that are far behind:
# long prompts must not hold up the other sequences.
MAX_READ_TOKENS = 4096
# Tokens that a step adds at most, accepted drafts and the one behind them: who misses no more is in step.
MAX_IN_STEP = MAX_SPECULATIVE_TOKENS + 1


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
        """For each sequence, up to the given number of ids that may follow its known tokens, in order.

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

        Takes in `MAX_READ_TOKENS` new tokens at most; with `num_tokens` = 0 it does only that, as may
        be done while a prompt is computed.
        """

    @abstractmethod
    def num_read(self, sequence: Sequence) -> int:
        """Tokens of it that are taken in."""

    @abstractmethod
    def forget(self, sequence: Sequence) -> None:
        """See `Drafter`."""

    def num_unread(self, sequence: Sequence) -> int | None:
        """See `Drafter`: reading is free."""
        return 0

    def propose(self, sequences: list[Sequence], num_tokens: list[int]) -> list[list[int]]:
        """See `Drafter`. A text that is far behind waits for the next call if others have read much."""
        num_left = MAX_READ_TOKENS
        drafts: list[list[int]] = []
        for sequence, num in zip(sequences, num_tokens, strict=True):
            num_new = sequence.num_tokens - self.num_read(sequence)
            if num_new > MAX_IN_STEP:
                if num_left <= 0:
                    drafts.append([])
                    continue
                num_left -= num_new
            drafts.append(self.guess(sequence, num))
        return drafts
