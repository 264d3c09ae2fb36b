from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from helpers.sampling_rows import TextRow, make_row, text_row
from naiad.sampling.draw import draw, draw_on_device, draws_of
from naiad.sampling.filters import Filters, threshold_among_best, top_p_now
from naiad.sampling.sampler import Sampler
from naiad.sequence import SamplingParams, TopPDecay

VOCAB_SIZE = 400
INT32_MAX = 2**31 - 1
SETTINGS = list(
    itertools.product((0.4, 1.0, 2.5), (0, 1, 7, 120), (1.0, 0.95, 0.5, 0.05), (0.0, 0.02, 0.3, 1.0))
)


def theirs(logits: Tensor, params: SamplingParams) -> Tensor:
    """[vocab_size] bool: the tokens that transformers keeps, computed in float64."""
    processors = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k:
        processors.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        processors.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        processors.append(MinPLogitsWarper(params.min_p))
    return processors(torch.zeros(1, 1, dtype=torch.int64), logits[None].double())[0].isfinite()


def ours(logits: Tensor, params: list[SamplingParams], width: int) -> tuple[Tensor, Tensor]:
    """The tokens that each row keeps, [num_rows, vocab_size] bool, and whether that is final, [num_rows]."""
    temperature = torch.tensor([[p.temperature] for p in params], dtype=torch.float64)
    scaled = (logits.double() - logits.double().amax(1, keepdim=True)) / temperature
    values = scaled.sort(dim=1, descending=True).values[:, :width]
    rows = [text_row(0, each, [1], []) for each in params]
    filters = Filters.of(rows, logits.shape[1], torch.device("cpu"))
    threshold, is_final = threshold_among_best(values, filters, scaled.exp().sum(1))
    return scaled >= threshold, is_final


def make_params() -> list[SamplingParams]:
    return [
        SamplingParams(max_tokens=1, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        for temperature, top_k, top_p, min_p in SETTINGS
    ]


@pytest.mark.parametrize("seed", range(3))
def test_the_kept_sets_of_a_mixed_batch_are_those_of_transformers(seed: int) -> None:
    params = make_params()
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(params), VOCAB_SIZE, generator=generator, dtype=torch.float64) * 3
    kept, _ = ours(logits, params, VOCAB_SIZE)
    expected = torch.stack([theirs(row, each) for row, each in zip(logits, params, strict=True)])
    assert torch.equal(kept, expected)


def test_a_final_set_of_the_best_tokens_is_that_of_the_whole_row() -> None:
    params = make_params()
    # Ties, and impossible tokens.
    logits = torch.randn(len(params), VOCAB_SIZE, generator=torch.Generator().manual_seed(7)) * 3
    logits = (logits * 2).round() / 2
    logits[::3, 100:] = float("-inf")
    # Ties with the k-th token that continue beyond the candidates.
    logits[1::3, 60:] = -6.0
    expected, _ = ours(logits, params, VOCAB_SIZE)
    kept, is_final = ours(logits, params, 240)
    assert torch.equal(kept[is_final], expected[is_final])
    assert 0.5 < is_final.float().mean() < 1


def test_the_mass_that_top_p_keeps_is_minimal() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(200, VOCAB_SIZE, generator=generator) * 2
    shares = torch.linspace(0.01, 0.999, 200, dtype=torch.float64).tolist()
    params = [SamplingParams(max_tokens=1, temperature=1.0, top_p=share) for share in shares]
    kept, _ = ours(logits, params, VOCAB_SIZE)
    probabilities = logits.double().softmax(1)
    for row, mask, share in zip(probabilities, kept, shares, strict=True):
        mass = row[mask].sum()
        assert mass >= share - 1e-12
        assert mass - row[mask].min() < share
        assert row[mask].min() > row[~mask].max()


@pytest.mark.parametrize(
    ("output", "decay", "expected"),
    [
        ([], TopPDecay(0.5, 0.0), 0.8),
        ([7], TopPDecay(0.5, 0.0), 0.4),
        ([7, 7, 7], TopPDecay(0.5, 0.0), 0.1),
        ([7, 7, 7], TopPDecay(0.5, 0.3), 0.3),
        ([7], TopPDecay(0.5, 0.9), 0.9),
        ([7, 9, 7], TopPDecay(0.5, 0.0, 9), 0.4),
        ([9, 7, 7], TopPDecay(0.5, 0.0, 9), 0.2),
        ([7, 7, 9], TopPDecay(0.5, 0.3, 9), 0.8),
        ([7, 7], TopPDecay(0.5, 0.0, 9), 0.2),
        ([7, 7, 7], None, 0.8),
    ],
)
def test_top_p_decays_with_each_token(output: list[int], decay: TopPDecay | None, expected: float) -> None:
    row = make_row(prompt=[9, 9], output=output, top_p=0.8, top_p_decay=decay)
    assert top_p_now(row) == pytest.approx(expected)


@pytest.mark.parametrize("top_k", [0, 30])
def test_a_decayed_top_p_draws_as_one_that_was_sent(top_k: int) -> None:
    logits = torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(1)).repeat(200, 1)
    tokens: list[list[int]] = []
    for params in ({"top_p": 1.0, "top_p_decay": TopPDecay(0.5, 0.0)}, {"top_p": 0.25}):
        rows = [
            make_row(n, output=[3, 4], temperature=1.0, top_k=top_k, seed=n, **params) for n in range(200)
        ]
        sampled = Sampler(VOCAB_SIZE).sample(logits.clone(), rows).sampled_token_ids
        tokens.append([sampled[n] for n in range(200)])
    assert tokens[0] == tokens[1]
    assert len(set(tokens[0])) > 2


def test_only_a_reset_needs_the_tokens_themselves() -> None:
    sampler = Sampler(VOCAB_SIZE)
    for reset_id, expected in ((-1, False), (0, True)):
        params = SamplingParams(max_tokens=1, top_p_decay=TopPDecay(0.5, 0.0, reset_id))
        assert sampler.reads_tokens(params) == expected


def by_sampler(logits: Tensor, rows: list[TextRow]) -> list[int]:
    sampled = Sampler(logits.shape[1]).sample(logits.clone(), rows).sampled_token_ids
    return [sampled[n] for n in range(len(rows))]


def by_torch(logits: Tensor, rows: list[TextRow]) -> list[int]:
    token_ids = logits.argmax(1)
    draw(logits, logits.amax(1), rows, list(range(len(rows))), token_ids)
    return token_ids.tolist()


def on_device(logits: Tensor, rows: list[TextRow]) -> list[int]:
    token_ids = logits.argmax(1)
    draw_on_device(logits, logits.amax(1), rows, list(range(len(rows))), token_ids)
    return token_ids.tolist()


@pytest.mark.parametrize("way", [by_sampler, by_torch, on_device])
@pytest.mark.parametrize("more", [{}, {"top_p": 0.9}, {"min_p": 0.02}])
def test_a_top_k_beyond_the_vocabulary_is_that_of_the_vocabulary(
    way: Callable[[Tensor, list[TextRow]], list[int]], more: dict[str, float]
) -> None:
    logits = torch.randn(100, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    drawn = [
        way(logits, [make_row(n, temperature=1.5, top_k=top_k, seed=n, **more) for n in range(100)])
        for top_k in (VOCAB_SIZE, VOCAB_SIZE + 1, INT32_MAX)
    ]
    assert drawn[1] == drawn[2] == drawn[0]
    assert len(set(drawn[0])) > 20


def test_native_kernels_get_a_top_k_within_the_vocabulary() -> None:
    draws = draws_of([make_row(top_k=top_k, temperature=1.0) for top_k in (5, INT32_MAX)], VOCAB_SIZE)
    assert draws is not None
    assert draws.filters.top_k.tolist() == [5, VOCAB_SIZE]
