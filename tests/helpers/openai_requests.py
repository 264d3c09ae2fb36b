"""Random requests of the OpenAI API, and what has to be equal in their answers."""

from __future__ import annotations

import random
from typing import Any

from helpers.openai_api import Said


def drawn(draw: random.Random) -> dict[str, Any]:
    """Draw a request; every field is there in some."""
    asked: dict[str, Any] = {
        "max_tokens": draw.randint(1, 24),
        "seed": draw.randrange(2**63),
        "ignore_eos": True,
    }
    choices: dict[str, list[Any]] = {
        "temperature": [0, 0.5, 1.0, 1.7],
        "top_p": [0.3, 0.9, 1.0],
        "top_k": [-1, 0, 1, 7],
        "min_p": [0, 0.05],
        "presence_penalty": [-1.0, 0.7],
        "frequency_penalty": [0.4],
        "repetition_penalty": [1.2],
        "min_tokens": [0, 1],
        "n": [1, 2, 3],
        "stop": ["e", ["a", "th", " "]],
        "include_stop_str_in_output": [True, False],
        "stop_token_ids": [[5, 6, 7, 300]],
        "logit_bias": [{"17": 5.0, "300": -3}],
        "bad_words": [["the"]],
        "allowed_token_ids": [list(range(3, 200))],
        "skip_special_tokens": [True, False],
        "num_draft_tokens": [0, 3],
        "priority": [-1, 2],
        "cache_salt": ["tenant"],
    }
    for name, values in choices.items():
        if draw.random() < 0.3:
            asked[name] = draw.choice(values)
    return asked


def comparable(said: Said) -> tuple[Any, ...]:
    usage = {name: said.usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    return said.texts, said.reasons, said.stop_reasons, said.token_ids, usage
