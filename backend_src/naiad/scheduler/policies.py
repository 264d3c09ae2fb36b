"""Scheduling policies: each gives a sequence a rank on arrival, which the sequence keeps.

A rank is a time: the arrival time plus a handicap. So every policy ages waiting sequences: whoever
arrives after another sequence's handicap has run out comes after that sequence, however large the
handicap is. Ranks never change, so the order of a tenant's sequences never changes either.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from naiad.sequence import Sequence


def rank_key(sequence: Sequence) -> tuple[float, int]:
    """The sort key for sequences of one tenant."""
    return sequence.rank, sequence.sequence_id


class SchedulingPolicy(Protocol):
    """Orders a tenant's sequences."""

    def rank(self, sequence: Sequence) -> float:
        """The rank in seconds on the clock of `arrival_s`; the smallest goes first."""

    def may_preempt(self, waiting: Sequence, running: Sequence) -> bool:
        """Whether a waiting sequence may preempt a running one with a larger rank."""


@dataclass(frozen=True, slots=True)
class FirstComeFirstServed:
    """Orders by arrival."""

    def rank(self, sequence: Sequence) -> float:
        """The arrival time."""
        return sequence.arrival_s

    def may_preempt(self, waiting: Sequence, running: Sequence) -> bool:
        """Never: running sequences arrived first."""
        return False


@dataclass(frozen=True, slots=True)
class PriorityFirst:
    """Orders by `priority`, smaller first; each unit is worth a fixed time of waiting.

    A sequence of priority p is overtaken only by sequences of a smaller priority q that arrive less
    than (p − q) × aging_s after it.

    Attributes:
        aging_s: seconds of waiting that make up for one unit of priority, > 0.
    """

    aging_s: float

    def rank(self, sequence: Sequence) -> float:
        """The arrival time, delayed by the priority."""
        return sequence.arrival_s + self.aging_s * sequence.params.priority

    def may_preempt(self, waiting: Sequence, running: Sequence) -> bool:
        """Only sequences with a larger priority number are preempted."""
        return waiting.params.priority < running.params.priority


@dataclass(frozen=True, slots=True)
class ShortestPromptFirst:
    """Orders by the length of the prompt; every token is worth a fixed time of waiting.

    Attributes:
        token_s: seconds of waiting that make up for one prompt token, > 0.
    """

    token_s: float

    def rank(self, sequence: Sequence) -> float:
        """The arrival time, delayed by the prompt's length."""
        return sequence.arrival_s + self.token_s * sequence.num_prompt_tokens

    def may_preempt(self, waiting: Sequence, running: Sequence) -> bool:
        """Never: computed work is not discarded for a shorter prompt."""
        return False


def make_policy(name: str, aging_s: float) -> SchedulingPolicy:
    """Make the policy that the configuration names.

    Args:
        name: one of `naiad.config.engine_config.SCHEDULING_POLICIES`.
        aging_s: seconds of waiting that one unit of priority, or a hundred prompt tokens, is worth.
    """
    policies: dict[str, SchedulingPolicy] = {
        "fcfs": FirstComeFirstServed(),
        "priority": PriorityFirst(aging_s),
        "shortest_prompt": ShortestPromptFirst(aging_s / 100),
    }
    return policies[name]
