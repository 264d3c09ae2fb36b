"""Best tokens that a model finds with its logits: when the sampler takes them, and that nothing changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from naiad.errors import InternalError
from naiad.sampling.draw import draws_of
from naiad.sampling.row_state import RowState
from naiad.sampling.sampler import Picked, Sampler
from naiad.sequence import SamplingParams
from naiad_kernels.best_tokens import BestTokens, best_tokens

VOCAB_SIZE = 300


def make_row(sequence_id: int, **params: Any) -> RowState:
    row = Sampler(VOCAB_SIZE).new_row(sequence_id, SamplingParams(max_tokens=9, **params), 1)
    row.advance([5])
    return row


@pytest.mark.parametrize(
    "params",
    [{}, {"temperature": 0.8}, {"temperature": 0.8, "top_k": 3, "top_p": 0.5}, {"stop_token_ids": (1,)}],
    ids=str,
)
def test_plain_rows_take_it(params: dict[str, Any]) -> None:
    logits = torch.randn(4, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    rows = [make_row(index, **params) for index in range(4)]
    sampler = Sampler(VOCAB_SIZE)
    assert sampler.takes_best(rows)
    alone = sampler.sample(logits.clone(), rows)
    given = sampler.finish(sampler.start(logits.clone(), rows, Picked(best_tokens(logits), None)))
    assert given.sampled_token_ids == alone.sampled_token_ids
    assert len(given.sampled_token_ids) == 4


def test_what_is_given_is_used() -> None:
    """A greedy row's id is not looked for again."""
    best = BestTokens(torch.tensor([7, 8]), torch.tensor([1.0, 2.0]))
    sampler = Sampler(VOCAB_SIZE)
    rows = [make_row(0), make_row(1)]
    output = sampler.finish(sampler.start(torch.zeros(2, VOCAB_SIZE), rows, Picked(best, None)))
    assert output.sampled_token_ids == {0: 7, 1: 8}


def test_tokens_drawn_are_used() -> None:
    logits = torch.zeros(2, VOCAB_SIZE)
    rows = [make_row(0), make_row(1, temperature=0.8)]
    sampler = Sampler(VOCAB_SIZE)
    best, draws = best_tokens(logits), draws_of(rows, VOCAB_SIZE)
    assert draws is not None
    draws.token_ids.copy_(torch.tensor([5, 17]))
    output = sampler.finish(sampler.start(logits, rows, Picked(best, draws)))
    assert output.sampled_token_ids == {0: 5, 1: 17}


def test_rows_that_take_their_best_token_draw_nothing() -> None:
    rows = [
        make_row(0),
        make_row(1, temperature=0.8, top_k=1),
        make_row(2, temperature=1.0, num_candidates=4),
    ]
    assert draws_of(rows, VOCAB_SIZE) is None
    draws = draws_of([*rows, make_row(3, temperature=0.8)], VOCAB_SIZE)
    assert draws is not None
    assert draws.filters.temperature.tolist() == [0.0, 0.0, 0.0, 0.8]


@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 1.1},
        {"logit_bias": ((1, 2.0),)},
        {"allowed_token_ids": (1, 2)},
        {"bad_words": ((3,),)},
        {"min_tokens": 3, "stop_token_ids": (1,)},
        {"top_n_sigma": 1.0},
        {"num_log_probs": 0},
        {"returns_generation_logits": True},
        {"num_candidates": 2},
    ],
    ids=str,
)
def test_a_row_that_asks_for_more_does_not(params: dict[str, Any]) -> None:
    """Neither do its neighbours, its clone, and its views after drafts."""
    row = make_row(1, **params)
    for each in (row, row.clone(2), row.at(-1, [4])):
        assert not Sampler(VOCAB_SIZE).takes_best([make_row(0), each])


def test_clones_and_views_of_plain_rows_are_plain() -> None:
    row = make_row(1)
    seeded = row.clone(2, SamplingParams(max_tokens=9, seed=3))
    assert Sampler(VOCAB_SIZE).takes_best([row.clone(2), seeded, row.at(-1, [4])])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_row_that_cannot_be_used_fails_alone(temperature: float, bad: float) -> None:
    logits = torch.randn(3, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    logits[1] = bad
    sampler = Sampler(VOCAB_SIZE)
    rows = [make_row(index, temperature=temperature) for index in range(3)]
    output = sampler.finish(sampler.start(logits.clone(), rows, Picked(best_tokens(logits), None)))
    assert set(output.sampled_token_ids) == {0, 2}
    assert isinstance(output.errors[1], InternalError)
