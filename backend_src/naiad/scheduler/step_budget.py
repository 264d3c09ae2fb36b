"""The token budget of one step, and how much of it is left."""

from __future__ import annotations

import math
from dataclasses import dataclass

# The first chunk of a prompt in a step is at least this long, however little time the step has: so
# long prompts advance, and by enough tokens to be worth a step's fixed cost.
MIN_CHUNK_TOKENS = 16
_ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """The limits of one step.

    A step costs at most as much as one chunk of `max_num_batched_tokens` without earlier context,
    except that the next tokens of running sequences are never delayed for their cost.

    Attributes:
        max_num_seqs: maximum number of sequences that run at the same time.
        max_num_batched_tokens: maximum number of tokens that a step computes.
        context_cost: the additional cost of a prompt token for each token that it attends to, relative
            to its cost without context. 0 if it was not measured.
        decode_cost: the cost of the next token of a running sequence, in prompt tokens.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    context_cost: float = 0.0
    decode_cost: float = 1.0

    def __post_init__(self) -> None:
        """Check that a step has room for at least one token."""
        assert self.max_num_seqs >= 1
        assert self.max_num_batched_tokens >= 1
        assert self.context_cost >= 0
        assert self.decode_cost >= 1


class StepBudget:
    """Hands out a step's tokens."""

    def __init__(self, limits: SchedulerLimits) -> None:
        """Start with the budget of a whole step."""
        self._context_cost = limits.context_cost
        self._decode_cost = limits.decode_cost
        self._max_tokens = self._tokens_left = limits.max_num_batched_tokens
        # One whole chunk without earlier context spends it exactly.
        self._cost_left = self._chunk_cost(0, limits.max_num_batched_tokens)
        self._has_chunk = False

    @property
    def num_taken(self) -> int:
        """Number of tokens handed out so far, drafts included."""
        return self._max_tokens - self._tokens_left

    @property
    def is_spent(self) -> bool:
        """Whether `take` would return 0."""
        return self._tokens_left == 0 or (self._cost_left < 1 and self._has_chunk)

    @property
    def num_drafts_left(self) -> int:
        """The most draft tokens that `take_drafts` would grant to a sequence without context."""
        return max(0, min(self._tokens_left, int(self._cost_left)))

    def take(self, start: int, num_missing: int) -> int:
        """How many tokens to compute now for a sequence with `start` computed and `num_missing` missing."""
        if self.is_spent:
            return 0
        if num_missing == 1:
            num_tokens, cost = 1, self._decode_cost
        else:
            num_tokens = min(self._affordable(start), num_missing, self._tokens_left)
            cost = self._chunk_cost(start, num_tokens)
            self._has_chunk = True
        self._tokens_left -= num_tokens
        self._cost_left -= cost
        return num_tokens

    def take_drafts(self, start: int, num_tokens: int) -> int:
        """How many of these draft tokens, at the position `start`, still fit the budget.

        Each costs as much as a prompt token at that position.
        """
        each = 1 + self._context_cost * start
        num_tokens = max(0, min(num_tokens, self._tokens_left, int(self._cost_left / each)))
        self._tokens_left -= num_tokens
        self._cost_left -= num_tokens * each
        return num_tokens

    def _chunk_cost(self, start: int, num_tokens: int) -> float:
        return num_tokens * (1 + self._context_cost * (start + num_tokens / 2))

    def _affordable(self, start: int) -> int:
        """The length of the longest chunk, at least one token, that the remaining cost allows."""
        fewest = 1 if self._has_chunk else MIN_CHUNK_TOKENS
        # This form of the quadratic formula also works for a context cost of 0.
        linear = 1 + self._context_cost * start
        root = math.sqrt(linear * linear + 2 * self._context_cost * max(0.0, self._cost_left))
        return max(fewest, int(2 * self._cost_left / (linear + root) + _ROUNDING))
