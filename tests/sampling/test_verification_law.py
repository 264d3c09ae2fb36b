"""What comes out with drafts: the law of the next three tokens, and the very tokens of each seed.

The model is a table: the logits of the next token depend on the last two tokens.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from naiad.outputs import ModelOutput, ScheduledSequence
from naiad.sampling.logits_processors import LOGITS_PROCESSORS, apply_processors
from naiad.sampling.sampler import Sampler
from naiad.sampling.verification import sampled_views, verify
from naiad.sequence import SamplingParams, Sequence

VOCAB_SIZE = 5
NUM_TOKENS = 3
NUM_DRAWS = 50_000
PROMPT = [3, 1]
TABLE = torch.tensor(np.random.default_rng(4).normal(0, 1.2, (VOCAB_SIZE, VOCAB_SIZE, VOCAB_SIZE)))

SETTINGS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 3},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 1.5, "min_p": 0.2, "logit_bias": ((2, 1.0),)},
    {"temperature": 1.0, "repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.7},
    {"temperature": 1.0, "bad_words": ((0, 1), (4,)), "min_tokens": 2, "stop_token_ids": (2,)},
    {"temperature": 0.9, "allowed_token_ids": (0, 2, 3), "top_k": 2, "top_p": 0.9},
]


def logits_after(text: list[int]) -> torch.Tensor:
    return TABLE[text[-2], text[-1]]


def good(text: list[int], number: int) -> list[int]:
    """The model's best next tokens."""
    known = list(text)
    for _ in range(NUM_TOKENS):
        known.append(int(logits_after(known).argmax()))
    return known[len(text) :]


def bad(text: list[int], number: int) -> list[int]:
    """Any tokens, as many as it likes."""
    return [(7 * number + 3 * len(text) + place) % VOCAB_SIZE for place in range(number % (NUM_TOKENS + 1))]


def adversarial(text: list[int], number: int) -> list[int]:
    """The model's worst next tokens."""
    known = list(text)
    for _ in range(NUM_TOKENS):
        known.append(int(logits_after(known).argmin()))
    return known[len(text) :]


Drafts = Callable[[list[int], int], list[int]]
Verify = Callable[..., ModelOutput]


def accept_everything(
    rows: list[ScheduledSequence], views: list[list[Sequence]], sampled: Any
) -> ModelOutput:
    """A wrong rule: a draft that is possible at all is accepted."""
    output = ModelOutput({})
    for row, row_views in zip(rows, views, strict=True):
        last = sampled.sampled_token_ids[row_views[-1].sequence_id]
        output.sampled_token_ids[row.sequence.sequence_id] = [*row.draft_token_ids, last]
    return output


def generate(
    settings: dict[str, Any], drafts: Drafts, num_draws: int, rule: Verify = verify
) -> list[tuple[int, ...]]:
    """The first three tokens of each seed."""
    sequences = [
        Sequence(
            number,
            list(PROMPT),
            len(PROMPT),
            SamplingParams(max_tokens=NUM_TOKENS, seed=number, **settings),
            0.0,
        )
        for number in range(num_draws)
    ]
    sampler = Sampler(VOCAB_SIZE)
    while pending := [each for each in sequences if each.num_output_tokens < NUM_TOKENS]:
        rows = []
        for sequence in pending[:4000]:
            guess = drafts(sequence.token_ids, sequence.sequence_id)
            guess = guess[: NUM_TOKENS - sequence.num_output_tokens - 1]
            start = sequence.num_tokens - 1
            rows.append(ScheduledSequence(sequence, start, 1 + len(guess), True, tuple(guess)))
        views = sampled_views(rows)
        logits = torch.stack([logits_after(view.token_ids) for each in views for view in each]).float()
        sampled = sampler.sample(logits, [view for each in views for view in each])
        output = rule(rows, views, sampled)
        for row in rows:
            row.sequence.token_ids += output.sampled_token_ids[row.sequence.sequence_id]
    return [tuple(sequence.output_token_ids) for sequence in sequences]


def exact_law(settings: dict[str, Any]) -> dict[tuple[int, ...], float]:
    """By the definitions: processors, temperature, top-k, top-p, min-p, one token after the other."""
    law = {(): 1.0}
    for _ in range(NUM_TOKENS):
        longer: dict[tuple[int, ...], float] = {}
        for tokens, chance in law.items():
            for token, theirs in enumerate(next_law(tokens, settings)):
                if theirs > 0:
                    longer[(*tokens, token)] = chance * theirs
        law = longer
    return law


def next_law(tokens: tuple[int, ...], settings: dict[str, Any]) -> list[float]:
    params = SamplingParams(max_tokens=NUM_TOKENS, **settings)
    row = Sequence(0, [*PROMPT, *tokens], len(PROMPT), params, 0.0)
    logits = logits_after(row.token_ids).float()[None].clone()
    apply_processors(LOGITS_PROCESSORS, logits, [row])
    law = torch.softmax(logits[0].double() / params.temperature, 0)
    order = law.argsort(descending=True).tolist()
    kept = order[: params.top_k or VOCAB_SIZE]
    mass, before, nucleus = sum(float(law[each]) for each in kept), 0.0, []
    for token in kept:
        if before >= params.top_p * mass or float(law[token]) < params.min_p * float(law.max()):
            break
        nucleus.append(token)
        before += float(law[token])
    return [float(law[token]) / before if token in nucleus else 0.0 for token in range(VOCAB_SIZE)]


def p_value(drawn: list[tuple[int, ...]], law: dict[tuple[int, ...], float]) -> float:
    counts = Counter(drawn)
    assert counts.keys() <= law.keys(), "a text that is not possible"
    # Texts that are too rare for the test stand together.
    common = [text for text in law if law[text] * len(drawn) >= 10]
    rest = max(0.0, 1 - sum(law[text] for text in common)) * len(drawn)
    observed = [counts[text] for text in common]
    expected = [law[text] * len(drawn) for text in common]
    if rest >= 10:
        observed.append(len(drawn) - sum(observed))
        expected.append(rest)
    scale = sum(observed) / sum(expected)
    return float(stats.chisquare(observed, [scale * each for each in expected]).pvalue)


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [good, bad, adversarial])
@pytest.mark.parametrize("settings", SETTINGS)
def test_the_law_of_three_tokens_is_the_models(settings: dict[str, Any], drafts: Drafts) -> None:
    assert p_value(generate(settings, drafts, NUM_DRAWS), exact_law(settings)) > 1e-4


def test_the_law_is_the_models_under_mixed_drafts() -> None:
    settings = SETTINGS[3] | {"repetition_penalty": 1.2}
    by_number = itertools.cycle((good, bad, adversarial))
    drafters = [next(by_number) for _ in range(NUM_DRAWS)]

    def mixed(text: list[int], number: int) -> list[int]:
        return drafters[number](text, number)

    assert p_value(generate(settings, mixed, NUM_DRAWS), exact_law(settings)) > 1e-4


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("drafts", [good, bad, adversarial])
def test_each_seed_gives_the_tokens_that_it_gives_without_drafts(
    settings: dict[str, Any], drafts: Drafts
) -> None:
    def none(text: list[int], number: int) -> list[int]:
        return []

    assert generate(settings, drafts, 600) == generate(settings, none, 600)


def test_a_wrong_rule_fails_the_test() -> None:
    drawn = generate(SETTINGS[0], good, 5_000, accept_everything)
    assert p_value(drawn, exact_law(SETTINGS[0])) < 1e-9
