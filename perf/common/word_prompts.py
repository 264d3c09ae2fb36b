"""Prompts of common words, for which the text and the ids are the same prompt."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # It imports torch, which takes seconds and is not needed by load generators.
    from naiad.cli.bench.throughput import Prompts, Work

_WORDS = (
    *("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world"),
    *("school", "state", "family", "student", "group", "country", "problem", "hand", "part", "place"),
    *("case", "week", "company", "system", "program", "question", "work", "number", "night"),
)


def single_token_words(tokenizer: Any) -> list[int]:
    """Find the ids of common words that are one token after a space.

    Raises:
        RuntimeError: the tokenizer has too few of them for prompts.
    """
    encoded = [tokenizer.encode(f" {word}", add_special_tokens=False) for word in _WORDS]
    ids = [token_ids[0] for token_ids in encoded if len(token_ids) == 1]
    if len(ids) < 4:
        raise RuntimeError("this tokenizer splits common words: no prompts of an exact length can be made")
    return ids


def word_prompts(work: Work, first_ids: list[int], word_ids: list[int], seed: int | str) -> Prompts:
    """Make prompts of whole words, so that text and ids are the same prompt.

    Args:
        work: the number and length of the prompts.
        first_ids: the ids that the tokenizer puts before every text.
        word_ids: the ids of the words to draw from.
        seed: another seed gives other prompts.
    """
    draw = random.Random(f"{work.batch} {seed}")
    num_words = work.prompt_tokens - len(first_ids)
    return [first_ids + draw.choices(word_ids, k=num_words) for _ in range(work.batch)]


def word_text(num_words: int, draw: random.Random) -> str:
    """Make a text of this many random words, which are about as many tokens."""
    return " ".join(draw.choices(_WORDS, k=num_words))
