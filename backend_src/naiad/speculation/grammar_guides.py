"""Follows sequences through their grammars, to know which tokens must come next and which cannot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from naiad.grammar import CompiledGrammar, GrammarMatcher
from naiad.sequence import Sequence


@dataclass(slots=True)
class _Guide:
    matcher: GrammarMatcher
    num_read: int = 0


class GrammarGuides:
    """A matcher for each sequence with a grammar that may get drafts.

    The runner's own matchers decide which tokens are possible. These only judge guesses, so a matcher that
    fails costs drafts and nothing else.
    """

    def __init__(self) -> None:
        """Start without sequences."""
        self._guides: dict[int, _Guide] = {}

    def forced(self, sequence: Sequence, num_tokens: int) -> list[int]:
        """Return at most so many tokens that are likely to follow, because their text must follow."""
        grammar = cast(CompiledGrammar, sequence.grammar)
        if num_tokens <= 0 or not grammar.has_canonical_tokens:
            return []
        return self._at_end(sequence).forced()[:num_tokens]

    def allowed(self, sequence: Sequence, draft: list[int]) -> list[int]:
        """Cut a draft before the first token that the grammar does not allow."""
        return draft[: self._at_end(sequence).num_allowed(draft)] if draft else draft

    def forget(self, sequence: Sequence) -> None:
        """Release the state of a sequence that has ended."""
        self._guides.pop(sequence.sequence_id, None)

    def _at_end(self, sequence: Sequence) -> GrammarMatcher:
        """The sequence's matcher, after all its known tokens."""
        guide = self._guides.get(sequence.sequence_id)
        if guide is None:
            matcher = cast(CompiledGrammar, sequence.grammar).matcher()
            guide = self._guides[sequence.sequence_id] = _Guide(matcher)
        num_output = sequence.num_output_tokens
        if num_output > guide.num_read:
            guide.matcher.advance(sequence.token_ids[sequence.num_prompt_tokens + guide.num_read :])
            guide.num_read = num_output
        return guide.matcher
