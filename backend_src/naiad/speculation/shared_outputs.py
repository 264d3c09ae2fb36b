"""Outputs of ended sequences, kept for later ones: bounded, and separate for each tenant."""

from __future__ import annotations

from itertools import count

from naiad.speculation.suffix_automaton import SuffixAutomaton

# Ends each output; it is not a token id, so no match crosses it.
END = -1

_NUM_PARTS = 4
# There is at most one automaton per this many tokens of the limit: each takes memory besides its tokens.
_TOKENS_A_PART = 16


class SharedOutputs:
    """Keeps earlier outputs in parts: automata, each of one tenant.

    Nothing can be removed from an automaton, so whole parts are dropped. When room is needed, the part
    whose newest output is the oldest goes, whichever tenant it belongs to. So the bound is hard, and a
    single tenant keeps more than half of it. Tenants share the room, but one tenant's outputs are never
    read for another.
    """

    def __init__(self, max_tokens: int) -> None:
        """Start empty.

        Args:
            max_tokens: maximum for all tenants together; each output counts one more than its tokens.
        """
        self._max_tokens = max_tokens
        self._max_part_tokens = max_tokens // _NUM_PARTS
        self._max_parts = max(_NUM_PARTS, max_tokens // _TOKENS_A_PART)
        self._numbers = count()
        self._parts: dict[str, dict[int, SuffixAutomaton]] = {}
        # Part → tenant, by the age of the part's newest output, the oldest first.
        self._tenants: dict[int, str] = {}
        self._num_tokens = 0

    @property
    def num_tokens(self) -> int:
        """Number of tokens that count towards `max_tokens` now."""
        return self._num_tokens

    def parts(self, salt: str) -> dict[int, SuffixAutomaton]:
        """A tenant's parts, oldest first, by numbers that are never reused."""
        return self._parts.get(salt, {})

    def add(self, salt: str, token_ids: list[int]) -> None:
        """Add an output; if it is longer than a part, only its end."""
        max_tokens = self._max_part_tokens - 1
        if not token_ids or max_tokens < 1:
            return
        token_ids = token_ids[-max_tokens:]
        part = self._part_for(salt, len(token_ids) + 1)
        for token_id in token_ids:
            part.append(token_id)
        part.append(END)

    def _part_for(self, salt: str, num_tokens: int) -> SuffixAutomaton:
        """Return the tenant's newest part, or a new one if it is full, after making room under the bound."""
        parts = self._parts.setdefault(salt, {})
        number = next(reversed(parts), None)
        if number is None or parts[number].num_tokens + num_tokens > self._max_part_tokens:
            number = next(self._numbers)
            parts[number] = SuffixAutomaton()
        self._tenants.pop(number, None)
        self._tenants[number] = salt
        self._num_tokens += num_tokens
        while self._num_tokens > self._max_tokens or len(self._tenants) > self._max_parts:
            self._drop_oldest()
        return parts[number]

    def _drop_oldest(self) -> None:
        number = next(iter(self._tenants))
        salt = self._tenants.pop(number)
        self._num_tokens -= self._parts[salt].pop(number).num_tokens
        if not self._parts[salt]:
            del self._parts[salt]
