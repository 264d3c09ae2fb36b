"""All substrings of a growing text, with the tokens that followed each and how often.

A state represents the substrings that end at the same places of the text. They are suffixes of the
longest of them; the state's link leads to the state of the longest suffix that ends at more places.
A follower of a state is a token that came after its substrings. There are at most two states and
three followers per token of the text, and appending costs O(1) amortised (Blumer et al.,
"The smallest automaton recognizing the subwords of a text", 1985).
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

# Counts saturate at this value, which bounds the cost of counting: each link leads to a larger count, so
# an append changes at most this many counts and stops at the first saturated one.
MAX_COUNT = 16

ROOT = 0


class Follower(NamedTuple):
    """A token that came after a state's substrings.

    Attributes:
        token: the id.
        state: the state of the substrings extended by the token.
        num_times: how often the token came, at most `MAX_COUNT`.
        num_times_any: the sum of these counts over all followers of the state.
        num_followers: how many different tokens came.
    """

    token: int
    state: int
    num_times: int
    num_times_any: int
    num_followers: int


class SuffixAutomaton:
    """The text's substrings as states, numbered from `ROOT` (the empty substring) up."""

    def __init__(self) -> None:
        """Start with the empty text."""
        self.num_tokens = 0
        self._last = ROOT
        self._lengths = array("i", [0])
        self._links = array("i", [ROOT])
        self._counts = array("B", [0])
        # Most states have one follower; a dict holds any further ones.
        self._tokens = array("i", [0])
        self._targets = array("i", [ROOT])
        self._more: dict[int, dict[int, int]] = {}

    @property
    def repeated(self) -> int:
        """The state of the longest suffix of the text that also occurs earlier in it."""
        return self._links[self._last]

    def length(self, state: int) -> int:
        """Tokens of the state's longest substring."""
        return self._lengths[state]

    def link(self, state: int) -> int:
        """The state of the longest suffix that ends at more places; for the root, the root."""
        return self._links[state]

    def follow(self, state: int, token: int) -> int:
        """The state of the substrings extended by the token; `ROOT` if the token never followed them."""
        if self._tokens[state] == token:
            return self._targets[state]
        more = self._more.get(state)
        return ROOT if more is None else more.get(token, ROOT)

    def best_follower(self, state: int) -> Follower | None:
        """Return the most frequent follower; among ties, the token whose first occurrence is the latest.

        Returns:
            None if nothing follows, or if more than `MAX_COUNT` different tokens do, because then
            none has more than half of the counts.
        """
        if self._targets[state] == ROOT:
            return None
        counts = self._counts
        token, target = self._tokens[state], self._targets[state]
        best_count = total_count = counts[target]
        more = self._more.get(state)
        if more is None:
            return Follower(token, target, best_count, total_count, 1)
        if len(more) >= MAX_COUNT:
            return None
        for other, other_target in more.items():
            count = counts[other_target]
            total_count += count
            if count >= best_count:
                token, target, best_count = other, other_target, count
        return Follower(token, target, best_count, total_count, 1 + len(more))

    def append(self, token: int) -> None:
        """Extend the text by one token, a 32-bit int."""
        state = self._last
        new = self._last = self._add_state(self._lengths[state] + 1)
        while (target := self.follow(state, token)) == ROOT:
            self._set_follower(state, token, new)
            if state == ROOT:
                break
            state = self._links[state]
        if target != ROOT:
            self._links[new] = self._state_ending(state, token, target)
        self.num_tokens += 1
        counts, links = self._counts, self._links
        while new != ROOT and counts[new] < MAX_COUNT:
            counts[new] += 1
            new = links[new]

    def _state_ending(self, state: int, token: int, target: int) -> int:
        """Return the state whose longest substring is this state's longest one, extended by the token.

        If the target has longer substrings, these no longer end at the same places as its shorter ones,
        and the shorter ones move to a new state.
        """
        length = self._lengths[state] + 1
        if self._lengths[target] == length:
            return target
        copy = self._add_state(length)
        self._links[copy] = self._links[target]
        self._counts[copy] = self._counts[target]
        self._tokens[copy] = self._tokens[target]
        self._targets[copy] = self._targets[target]
        if target in self._more:
            self._more[copy] = dict(self._more[target])
        self._links[target] = copy
        while self.follow(state, token) == target:
            self._set_follower(state, token, copy)
            if state == ROOT:
                break
            state = self._links[state]
        return copy

    def _add_state(self, length: int) -> int:
        self._lengths.append(length)
        self._links.append(ROOT)
        self._counts.append(0)
        self._tokens.append(0)
        self._targets.append(ROOT)
        return len(self._lengths) - 1

    def _set_follower(self, state: int, token: int, target: int) -> None:
        if self._targets[state] == ROOT or self._tokens[state] == token:
            self._tokens[state] = token
            self._targets[state] = target
        else:
            self._more.setdefault(state, {})[token] = target
