"""Prompts of common words: as a text and as ids they are the same prompt."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # Its torch takes seconds to import; load generators have no use for it.
    from naiad.cli.bench.throughput import Prompts, Work

_WORDS = (
    *("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world"),
    *("school", "state", "family", "student", "group", "country", "problem", "hand", "part", "place"),
    *("case", "week", "company", "system", "program", "question", "work", "number", "night"),
)


def single_token_words(tokenizer: Any) -> list[int]:
    """Ids of common words that are one token after a space.

    Raises:
        RuntimeError: the tokenizer has too few of them to make prompts.
    """
    encoded = [tokenizer.encode(f" {word}", add_special_tokens=False) for word in _WORDS]
    ids = [token_ids[0] for token_ids in encoded if len(token_ids) == 1]
    if len(ids) < 4:
        raise RuntimeError("this tokenizer splits common words: no prompts of an exact length can be made")
    return ids


def word_prompts(work: Work, first_ids: list[int], word_ids: list[int], seed: int | str) -> Prompts:
    """Prompts of whole words, so that text and ids are the same prompt.

    Args:
        work: how many, how long.
        first_ids: what the tokenizer puts before every text.
        word_ids: drawn from.
        seed: other prompts for another seed.
    """
    draw = random.Random(f"{work.batch} {seed}")
    num_words = work.prompt_tokens - len(first_ids)
    return [first_ids + draw.choices(word_ids, k=num_words) for _ in range(work.batch)]


def word_text(num_words: int, draw: random.Random) -> str:
    """A text of so many random words: about as many tokens."""
    return " ".join(draw.choices(_WORDS, k=num_words))
