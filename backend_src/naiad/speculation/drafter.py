"""What every source of draft tokens looks like."""

from __future__ import annotations

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
    """

    needs_hidden_states: ClassVar[bool]

    def propose(self, sequence: Sequence, num_tokens: int) -> list[int]:
        """At most `num_tokens` ids that may follow the known tokens, the first one first.

        May be empty: no guess, or not all known tokens are taken in yet (`MAX_READ_TOKENS`). With
        `num_tokens` = 0 tokens are only taken in, as may be done while a prompt is computed.
        """

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended, whatever the reason: give back all that is kept for it.

        Its tokens are final. It need never have been seen before.
        """
