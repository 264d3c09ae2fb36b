"""Follows texts through compiled grammars, token by token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par

# Fewer masks are filled faster by one thread.
_MIN_PARALLEL = 4

# llguidance's words for a token with which a text would leave its grammar.
_NOT_ALLOWED = "doesn't satisfy the grammar"

# llguidance limits the work of the lexer from one mask of a grammar to the next. What is enough for one
# token is enough for some.
_MOST_WITHOUT_MASK = 16

Mask = npt.NDArray[np.int32]


@dataclass(slots=True)
class _Usage:
    """What all matchers of a grammar share: how many tokens were allowed since a mask was last filled."""

    num_without_mask: int = 0


class GrammarMatcher:
    """Where a text stands in its grammar.

    Attributes:
        error: why it cannot go on, such as a limit that is exceeded; empty: it can.
    """

    __slots__ = ("_matcher", "_usage", "error")

    def __init__(self, matcher: LLMatcher, error: str = "", usage: _Usage | None = None) -> None:
        """Take over a matcher, which nobody else uses; `usage` None: it is the first of its grammar."""
        self._matcher = matcher
        self._usage = usage or _Usage()
        self.error = error

    def clone(self) -> GrammarMatcher:
        """Return a matcher at the same place that advances on its own."""
        return GrammarMatcher(self._matcher.deep_copy(), self.error, self._usage)

    def advance(self, token_ids: Sequence[int]) -> None:
        """Take in the next tokens; one that is not allowed is an error."""
        if not self.error and not self._matcher.consume_tokens(list(token_ids)):
            self.error = readable(self._matcher.get_error()) or _NOT_ALLOWED

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """How many of these tokens may come next, one after the other."""
        return 0 if self.error else self._matcher.validate_tokens(list(token_ids))

    def forced(self) -> list[int]:
        """The tokens that a tokenizer makes of the text that must come next; often none."""
        return [] if self.error else self._matcher.compute_ff_tokens()

    @property
    def is_due(self) -> bool:
        """Whether a mask has to be filled before `surely_allows` is asked again."""
        return self._usage.num_without_mask >= _MOST_WITHOUT_MASK

    @property
    def is_forced(self) -> bool:
        """Whether some text must come next, so that a mask may allow only the first token of `forced`."""
        return not self.error and bool(self._matcher.compute_ff_bytes())

    def surely_allows(self, token_id: int) -> bool:
        """Whether a mask of this place would allow a token, told in a fraction of the time of filling one.

        False: it may or may not.
        """
        if self.num_allowed([token_id]) == 0:
            return False
        if self.is_forced:
            forced = self.forced()
            return not forced or forced[0] == token_id
        self._usage.num_without_mask += 1
        return True

    @property
    def has_worn_out(self) -> bool:
        """Whether a limit was exceeded; matchers of one grammar share what counts towards it."""
        return bool(self.error) and _NOT_ALLOWED not in self.error

    @property
    def is_complete(self) -> bool:
        """Whether the text may end here."""
        return not self.error and self._matcher.is_accepting()

    def take_error(self) -> bool:
        """Take notice that a mask of this place has been filled; return whether that, or the text, failed."""
        if not self.is_forced:
            # Otherwise the lexer had nothing to do.
            self._usage.num_without_mask = 0
        if not self.error and self._matcher.is_error():
            self.error = readable(self._matcher.get_error())
        return bool(self.error)


class MaskFiller:
    """Fills bitmasks of the tokens that may come next.

    Attributes:
        num_words: number of 32-bit words of a mask.
        end_token_ids: the ids that end a text.
    """

    def __init__(self, tokenizer: LLTokenizer, num_threads: int) -> None:
        """Set up.

        Args:
            tokenizer: of the matchers.
            num_threads: maximum number of threads that fill.
        """
        self.num_words = (tokenizer.vocab_size + 31) // 32
        self.end_token_ids = tuple(tokenizer.eos_tokens)
        self._num_threads = num_threads
        self._executor: LLExecutor | None = None

    def empty_masks(self, num_masks: int) -> Mask:
        """Return masks that allow nothing, `[num_masks, num_words]`."""
        return np.zeros((num_masks, self.num_words), dtype=np.int32)

    def fill(self, masks: Mask, matchers: Mapping[int, GrammarMatcher]) -> None:
        """Fill masks: bit i % 32 of word i // 32 is token i's. That of a text that cannot go on is empty.

        Args:
            masks: `[num_masks, num_words]`, with any content.
            matchers: of some masks, by their places.
        """
        usable = [(each._matcher, place) for place, each in matchers.items() if not each.error]
        if self._num_threads > 1 and len(usable) >= _MIN_PARALLEL:
            if self._executor is None:
                self._executor = LLExecutor(self._num_threads)
            fill_next_token_bitmask_par(self._executor, usable, masks)
        else:
            for each, place in usable:
                fill_next_token_bitmask(each, masks, place)
        for place, matcher in matchers.items():
            if matcher.take_error():
                masks[place] = 0


_MAX_MESSAGE = 300
# llguidance's words for a row of the parser, or all those of a mask, with more items than are allowed.
_TOO_MANY_WAYS = ("Current row has", "Too many items")


def readable(message: str) -> str:
    """Shorten one of llguidance's messages to a line."""
    if message.startswith("panic:"):
        return "it is too large"
    if any(each in message for each in _TOO_MANY_WAYS):
        return "at one place of the text it has too many ways to go on"
    return " ".join(message.replace("<non-verbose/>", "").split())[:_MAX_MESSAGE]
