"""Drafts change neither the distribution of the next three tokens nor the tokens of any seed.

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

from helpers.sampling_rows import text_row
from naiad.kv_cache.kv_cache_manager import KVCacheManager
from naiad.model_runner.sequence_states import SequenceStates
from naiad.outputs import ModelOutput, StepBatch, StepRow
from naiad.sampling.logits_processors import LOGITS_PROCESSORS, apply_processors
from naiad.sampling.row_state import RowState
from naiad.sampling.sampler import Sampler
from naiad.sampling.verification import sampled_views, verify
from naiad.sequence import SamplingParams, Sequence
from naiad.speculation.model_drafter import ModelDrafter

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
    """Arbitrary tokens, of arbitrary number."""
    return [(7 * number + 3 * len(text) + place) % VOCAB_SIZE for place in range(number % (NUM_TOKENS + 1))]


def adversarial(text: list[int], number: int) -> list[int]:
    """The model's worst next tokens."""
    known = list(text)
    for _ in range(NUM_TOKENS):
        known.append(int(logits_after(known).argmin()))
    return known[len(text) :]


Drafts = Callable[[list[int], int], list[int]]
Propose = Callable[[list[Sequence], list[int]], list[list[int]]]
Verify = Callable[..., ModelOutput]


def one_by_one(drafts: Drafts) -> Propose:
    """Drafts for each text independently."""

    def propose(sequences: list[Sequence], num_tokens: list[int]) -> list[list[int]]:
        return [
            drafts(sequence.token_ids, sequence.sequence_id)[:num]
            for sequence, num in zip(sequences, num_tokens, strict=True)
        ]

    return propose


class TableModel:
    """A draft model that is a table like the target, with different numbers."""

    def __init__(self) -> None:
        noise = np.random.default_rng(9).normal(0, 0.7, TABLE.shape)
        self.table = TABLE + torch.tensor(noise)
        self.sampler = Sampler(VOCAB_SIZE)
        self.states = SequenceStates(self.sampler)
        self.texts: dict[int, list[int]] = {}

    def run(self, step: StepBatch) -> ModelOutput:
        for admission in step.admissions:
            known = [] if admission.clone_of is None else self.texts[admission.clone_of]
            self.texts[admission.sequence_id] = list(known)
        for row in step.rows:
            self.texts[row.sequence_id][row.start - len(row.earlier_token_ids) :] = [
                *row.earlier_token_ids,
                *row.token_ids,
            ]
        last = [self.texts[row.sequence_id][-2:] for row in step.rows]
        logits = torch.stack([self.table[one, other] for one, other in last]).float()
        sampled = self.sampler.sample(logits, [state.sampling for _, state in self.states.take(step)])
        token_ids = {each: [token] for each, token in sampled.sampled_token_ids.items()}
        return ModelOutput(token_ids, errors=sampled.errors)

    def clear_slots(self, slots: list[list[int]]) -> None:
        raise AssertionError("no row fails")


def by_a_model(sequences: list[Sequence], num_tokens: list[int]) -> list[list[int]]:
    """The tokens that a draft model samples with the same noise."""
    kv_cache = KVCacheManager(len(sequences), 16)
    for sequence in sequences:
        sequence.block_table.clear()
        assert kv_cache.admit(sequence) == 0
    return ModelDrafter(TableModel(), kv_cache, None).propose(sequences, num_tokens)


PROPOSALS = [one_by_one(good), one_by_one(bad), one_by_one(adversarial), by_a_model]
NAMES = ["good", "bad", "adversarial", "by_a_model"]


def accept_everything(rows: list[StepRow], views: list[list[RowState]], sampled: Any) -> ModelOutput:
    """A wrong rule, which accepts every possible draft token."""
    output = ModelOutput({})
    for row, row_views in zip(rows, views, strict=True):
        last = sampled.sampled_token_ids[row_views[-1].sequence_id]
        output.sampled_token_ids[row.sequence_id] = [*row.draft_token_ids, last]
    return output


def generate(
    settings: dict[str, Any], propose: Propose, num_draws: int, rule: Verify = verify
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
        chosen = pending[:4000]
        guesses = propose(chosen, [NUM_TOKENS - each.num_output_tokens - 1 for each in chosen])
        rows = [
            StepRow(each.sequence_id, each.num_tokens - 1, each.token_ids[-1:], True, tuple(guess))
            for each, guess in zip(chosen, guesses, strict=True)
        ]
        states = [text_row(each.sequence_id, each.params, PROMPT, each.output_token_ids) for each in chosen]
        views = sampled_views(zip(rows, states, strict=True))
        texts = [
            [*each.token_ids, *row.draft_token_ids[:place]]
            for each, row in zip(chosen, rows, strict=True)
            for place in range(1 + len(row.draft_token_ids))
        ]
        logits = torch.stack([logits_after(text) for text in texts]).float()
        sampled = sampler.sample(logits, [view for each in views for view in each])
        output = rule(rows, views, sampled)
        for each in chosen:
            each.token_ids += output.sampled_token_ids[each.sequence_id]
    return [tuple(sequence.output_token_ids) for sequence in sequences]


def exact_law(settings: dict[str, Any]) -> dict[tuple[int, ...], float]:
    """Computed from the definitions: processors, temperature, top-k, top-p, min-p, token by token."""
    law = {(): 1.0}
    for _ in range(NUM_TOKENS):
        longer: dict[tuple[int, ...], float] = {}
        for tokens, chance in law.items():
            for token, theirs in enumerate(next_law(tokens, settings)):
                if theirs > 0:
                    longer[(*tokens, token)] = chance * theirs
        law = longer
    return law


def next_law(tokens: tuple[int, ...], settings: dict[str, Any], table: torch.Tensor = TABLE) -> list[float]:
    params = SamplingParams(max_tokens=NUM_TOKENS, **settings)
    row = text_row(0, params, PROMPT, list(tokens))
    logits = table[row.token_ids[-2], row.token_ids[-1]].float()[None].clone()
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
    # Texts that are too rare for the test are pooled.
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
@pytest.mark.parametrize("propose", PROPOSALS, ids=NAMES)
@pytest.mark.parametrize("settings", SETTINGS)
def test_the_law_of_three_tokens_is_the_models(settings: dict[str, Any], propose: Propose) -> None:
    assert p_value(generate(settings, propose, NUM_DRAWS), exact_law(settings)) > 1e-4


def test_the_law_is_the_models_under_mixed_drafts() -> None:
    settings = SETTINGS[3] | {"repetition_penalty": 1.2}
    by_number = itertools.cycle((good, bad, adversarial))
    drafters = [next(by_number) for _ in range(NUM_DRAWS)]

    def mixed(text: list[int], number: int) -> list[int]:
        return drafters[number](text, number)

    assert p_value(generate(settings, one_by_one(mixed), NUM_DRAWS), exact_law(settings)) > 1e-4


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("propose", PROPOSALS, ids=NAMES)
def test_each_seed_gives_the_tokens_that_it_gives_without_drafts(
    settings: dict[str, Any], propose: Propose
) -> None:
    def none(text: list[int], number: int) -> list[int]:
        return []

    assert generate(settings, propose, 600) == generate(settings, one_by_one(none), 600)


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_model_and_the_target_agree_as_often_as_shared_noise_lets_them(settings: dict[str, Any]) -> None:
    """At least (1 - d) / (1 + d) of first drafts agree, where d is the total variation distance."""
    sequences = [
        Sequence(
            number, list(PROMPT), len(PROMPT), SamplingParams(max_tokens=9, seed=number, **settings), 0.0
        )
        for number in range(1500)
    ]
    drafts = by_a_model(sequences, [1] * len(sequences))
    made = generate(settings, one_by_one(lambda text, number: []), len(sequences))
    agreed = sum(draft[0] == tokens[0] for draft, tokens in zip(drafts, made, strict=True)) / len(sequences)
    target, draft_law = (next_law((), settings, table) for table in (TABLE, TableModel().table))
    distance = sum(abs(a - b) for a, b in zip(target, draft_law, strict=True)) / 2
    assert 0 < distance < 1
    assert agreed >= (1 - distance) / (1 + distance) - 0.05


def test_a_wrong_rule_fails_the_test() -> None:
    drawn = generate(SETTINGS[0], one_by_one(good), 5_000, accept_everything)
    assert p_value(drawn, exact_law(SETTINGS[0])) < 1e-9
