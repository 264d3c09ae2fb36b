"""What one step may compute, and what is left of it."""

from __future__ import annotations

import math
from dataclasses import dataclass

# The first piece of a prompt in a step is no smaller: however little the step's time allows, long
# prompts advance, and not by tokens so few that a step's fixed cost is all that is paid.
MIN_CHUNK_TOKENS = 16
_ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What one step may hold.

    Attributes:
        max_num_seqs: sequences that run at the same time.
        max_num_batched_tokens: tokens that a step computes.
        context_cost: what a prompt token costs more for each token it attends to, as a part of
            what it costs otherwise. 0 on a device that is not told.
        decode_cost: what the one next token of a running text costs, in prompt tokens.

    A step's costs add up to at most those of one chunk of `max_num_batched_tokens` without earlier
    context, except that running texts are never held up by their cost.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    context_cost: float = 0.0
    decode_cost: float = 1.0

    def __post_init__(self) -> None:
        """There is room for something."""
        assert self.max_num_seqs >= 1
        assert self.max_num_batched_tokens >= 1
        assert self.context_cost >= 0
        assert self.decode_cost >= 1


class StepBudget:
    """Hands out a step's tokens."""

    def __init__(self, limits: SchedulerLimits) -> None:
        """A whole step's budget."""
        self._context_cost = limits.context_cost
        self._decode_cost = limits.decode_cost
        self._max_tokens = self._tokens_left = limits.max_num_batched_tokens
        # One whole chunk without earlier context spends it exactly.
        self._cost_left = self._chunk_cost(0, limits.max_num_batched_tokens)
        self._has_chunk = False

    @property
    def num_taken(self) -> int:
        """Tokens that were handed out, drafts included."""
        return self._max_tokens - self._tokens_left

    @property
    def is_spent(self) -> bool:
        """Whether `take` would give nothing."""
        return self._tokens_left == 0 or (self._cost_left < 1 and self._has_chunk)

    @property
    def num_drafts_left(self) -> int:
        """Draft tokens that `take_drafts` would give at most, of a sequence without context."""
        return max(0, min(self._tokens_left, int(self._cost_left)))

    def take(self, start: int, num_missing: int) -> int:
        """Tokens to compute now of a sequence that has `start` computed and `num_missing` to go."""
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

        Each costs what a prompt's token costs there.
        """
        each = 1 + self._context_cost * start
        num_tokens = max(0, min(num_tokens, self._tokens_left, int(self._cost_left / each)))
        self._tokens_left -= num_tokens
        self._cost_left -= num_tokens * each
        return num_tokens

    def _chunk_cost(self, start: int, num_tokens: int) -> float:
        return num_tokens * (1 + self._context_cost * (start + num_tokens / 2))

    def _affordable(self, start: int) -> int:
        """The most tokens, at least one, whose chunk costs no more than what is left."""
        fewest = 1 if self._has_chunk else MIN_CHUNK_TOKENS
        # Solved in the form that is exact for a context cost of 0 too.
        linear = 1 + self._context_cost * start
        root = math.sqrt(linear * linear + 2 * self._context_cost * max(0.0, self._cost_left))
        return max(fewest, int(2 * self._cost_left / (linear + root) + _ROUNDING))
