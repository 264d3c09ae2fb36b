"""The interface of drafters, the sources of draft tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Protocol

from naiad.config.engine_config import MAX_SPECULATIVE_TOKENS
from naiad.sequence import Sequence

# A drafter that reads text reads about this many tokens per step from texts with much unread: long
# prompts must not delay the other sequences.
MAX_READ_TOKENS = 4096
# The most tokens that a step adds: accepted drafts and one more. A drafter that lacks no more is up to date.
MAX_IN_STEP = MAX_SPECULATIVE_TOKENS + 1


class Drafter(Protocol):
    """Guesses how sequences continue; it keeps state for each sequence between calls.

    The first `propose` for a sequence creates its state, `forget` removes it. In between the sequence's
    `token_ids` only grow, and they contain no drafts: preemption takes blocks, not tokens.

    Attributes:
        is_free: whether a draft costs almost nothing. Then it is made first and cut to the length that
            pays; a `CostlyDrafter` needs passes of a model and is asked only for tokens that will be used.
    """

    is_free: ClassVar[bool]

    @property
    def num_failures(self) -> int:
        """How often drafting has failed with an error."""

    def propose(self, sequences: list[Sequence], num_tokens: list[int]) -> list[list[int]]:
        """For each sequence, return up to `num_tokens` ids that may follow its known tokens, in order.

        A draft may be empty: there is no guess, or not all known tokens have been read yet
        (`MAX_READ_TOKENS`, or the drafter's own limit).
        """

    def forget(self, sequence: Sequence) -> None:
        """Release the state of a sequence that has ended for any reason.

        Its tokens are final. The drafter may never have seen it before.
        """


class CostlyDrafter(Drafter, Protocol):
    """A `Drafter` whose `is_free` is false, such as `ModelDrafter`."""

    def num_unread(self, sequence: Sequence) -> int | None:
        """Number of known tokens, without the last, that it has to read before it can draft.

        The policy counts the cost of reading them. None: it has no draft for the sequence now.
        """


class TextDrafter(ABC):
    """A free `Drafter` that guesses from known tokens alone, one sequence after the other."""

    is_free: ClassVar[bool] = True
    num_failures = 0

    @abstractmethod
    def guess(self, sequence: Sequence, num_tokens: int) -> list[int]:
        """Return at most `num_tokens` ids that may follow the known tokens; see `Drafter.propose`.

        Reads at most `MAX_READ_TOKENS` new tokens. With `num_tokens` = 0 it only reads, which may be
        done while a prompt is computed.
        """

    @abstractmethod
    def num_read(self, sequence: Sequence) -> int:
        """Number of the sequence's tokens that have been read."""

    @abstractmethod
    def forget(self, sequence: Sequence) -> None:
        """Release the state of a sequence that has ended, as `Drafter` describes."""

    def propose(self, sequences: list[Sequence], num_tokens: list[int]) -> list[list[int]]:
        """Return a draft for each sequence, as `Drafter` describes.

        Once the call has read `MAX_READ_TOKENS`, further texts with many unread tokens wait for the next.
        """
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
