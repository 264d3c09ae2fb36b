"""Sequences for drafters, and texts that repeat themselves."""

from __future__ import annotations

from itertools import count

from hypothesis import strategies as st

from naiad.sequence import PrefixIdentity, SamplingParams, Sequence

_ids = count(1)

# Few different tokens, so that almost everything occurs again.
TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def draft_sequence(
    prompt: list[int], output: list[int] | None = None, salt: str = "", num_candidates: int = 0
) -> Sequence:
    return Sequence(
        sequence_id=next(_ids),
        token_ids=[*prompt, *(output or [])],
        num_prompt_tokens=len(prompt),
        params=SamplingParams(max_tokens=1000, num_candidates=num_candidates),
        arrival_s=0.0,
        prefix_identity=PrefixIdentity(salt),
    )


def ends(text: list[int], substring: list[int]) -> list[int]:
    """Where a substring ends in a text."""
    size = len(substring)
    return [end for end in range(size, len(text) + 1) if text[end - size : end] == substring]
