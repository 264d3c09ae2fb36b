"""Who goes first: policies give every sequence a rank when it comes, and it keeps that rank.

A rank is a time: the arrival, put off by a handicap. So every policy ages: however large a
handicap is, who comes later than the handicap is long stands behind. Ranks never change, so the
sequences of a tenant are always in one and the same order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from naiad.sequence import Sequence


def rank_key(sequence: Sequence) -> tuple[float, int]:
    """The order of sequences of one tenant."""
    return sequence.rank, sequence.sequence_id


class SchedulingPolicy(Protocol):
    """An order of a tenant's sequences."""

    def rank(self, sequence: Sequence) -> float:
        """Seconds on the clock of `arrival_s`; smaller goes first."""

    def may_preempt(self, waiting: Sequence, running: Sequence) -> bool:
        """Whether one that waits may take the place of one that runs and has a larger rank."""


@dataclass(frozen=True, slots=True)
class FirstComeFirstServed:
    """By arrival."""

    def rank(self, sequence: Sequence) -> float:
        """The arrival."""
        return sequence.arrival_s

    def may_preempt(self, waiting: Sequence, running: Sequence) -> bool:
        """Never: who runs came first."""
        return False


@dataclass(frozen=True, slots=True)
class PriorityFirst:
    """By `priority`, smaller first; each unit is worth a fixed time of waiting.

    A sequence of priority p is overtaken by those of the smaller priority q that come less than
    (p − q) × aging_s after it, and by no others.

    Attributes:
        aging_s: seconds of waiting that make up for one unit of priority, > 0.
    """

    aging_s: float

    def rank(self, sequence: Sequence) -> float:
        """The arrival, put off by the priority."""
        return sequence.arrival_s + self.aging_s * sequence.params.priority

    def may_preempt(self, waiting: Sequence, running: Sequence) -> bool:
        """Only one with a larger priority number gives way."""
        return waiting.params.priority < running.params.priority


@dataclass(frozen=True, slots=True)
class ShortestPromptFirst:
    """By the length of the prompt; every token is worth a fixed time of waiting.

    Attributes:
        token_s: seconds of waiting that make up for one prompt token, > 0.
    """

    token_s: float

    def rank(self, sequence: Sequence) -> float:
        """The arrival, put off by the prompt's length."""
        return sequence.arrival_s + self.token_s * sequence.num_prompt_tokens

    def may_preempt(self, waiting: Sequence, running: Sequence) -> bool:
        """Never: what is computed is not thrown away for what is short."""
        return False


def make_policy(name: str, aging_s: float) -> SchedulingPolicy:
    """The policy of a configuration.

    Args:
        name: one of `naiad.config.engine_config.SCHEDULING_POLICIES`.
        aging_s: seconds of waiting that a unit of priority, or a hundred prompt tokens, are worth.
    """
    policies: dict[str, SchedulingPolicy] = {
        "fcfs": FirstComeFirstServed(),
        "priority": PriorityFirst(aging_s),
        "shortest_prompt": ShortestPromptFirst(aging_s / 100),
    }
    return policies[name]
