from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

from helpers.sampling_rows import TextRow, make_row
from naiad.sampling.logits_processors import LOGITS_PROCESSORS, apply_processors
from naiad.sampling.sampler import Sampler

VOCAB_SIZE = 12
NUM_DRAWS = 20_000


def sample(logits: Tensor, rows: list[TextRow]) -> dict[int, int]:
    output = Sampler(logits.shape[1]).sample(logits.clone(), rows)
    assert not output.errors
    return output.sampled_token_ids


def exact_probabilities(
    logits: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Tensor:
    """Computed from the definitions, one token at a time."""
    probabilities = torch.softmax(logits.double() / temperature, 0)
    order = torch.argsort(probabilities, descending=True).tolist()
    kept = order[:top_k] if top_k else order
    mass = sum(float(probabilities[token]) for token in kept)
    nucleus: list[int] = []
    for token in kept:
        if sum(float(probabilities[t]) for t in nucleus) >= top_p * mass:
            break
        if float(probabilities[token]) < min_p * float(probabilities.max()):
            break
        nucleus.append(token)
    result = torch.zeros_like(probabilities)
    result[nucleus] = probabilities[nucleus]
    return result / result.sum()


FILTERED: list[tuple[float, int, float, float]] = [
    (1.0, 0, 1.0, 0.0),
    (0.5, 0, 1.0, 0.0),
    (1.7, 4, 1.0, 0.0),
    (1.0, 0, 0.8, 0.0),
    (0.8, 6, 0.9, 0.0),
    (2.0, 3, 0.5, 0.0),
    (1.0, 50, 1.0, 0.0),
    (1.0, 0, 1.0, 0.1),
    (2.5, 0, 1.0, 0.4),
    (1.3, 6, 1.0, 0.1),
    (1.3, 0, 0.9, 0.2),
    (1.5, 7, 0.95, 0.05),
]


@pytest.mark.parametrize(("temperature", "top_k", "top_p", "min_p"), FILTERED)
def test_draws_follow_the_exact_distribution(
    temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(3)) * 1.5
    rows = [
        make_row(seed, seed=seed, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        for seed in range(NUM_DRAWS)
    ]
    drawn = sample(logits.repeat(NUM_DRAWS, 1), rows)
    counts = torch.bincount(torch.tensor(list(drawn.values())), minlength=VOCAB_SIZE)
    expected = exact_probabilities(logits, temperature, top_k, top_p, min_p)
    possible = expected > 0
    assert counts[~possible].sum() == 0
    assert int(possible.sum()) > 1
    frequencies = (expected[possible] * NUM_DRAWS).numpy()
    assert stats.chisquare(counts[possible].numpy(), frequencies).pvalue > 1e-4


def test_draws_after_all_processors_follow_the_exact_distribution() -> None:
    logits = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(6))
    params: dict[str, Any] = {
        "temperature": 1.2,
        "min_p": 0.02,
        "logit_bias": ((2, 1.5), (5, -1.0)),
        "repetition_penalty": 1.4,
        "frequency_penalty": 0.3,
        "bad_words": ((3, 4), (7,)),
        "min_tokens": 9,
        "stop_token_ids": (11,),
        "allowed_token_ids": (0, 1, 2, 4, 5, 6, 7, 8, 9, 11),
    }
    rows = [make_row(seed, prompt=[1, 2], output=[5, 3], seed=seed, **params) for seed in range(NUM_DRAWS)]
    changed = logits[None].clone()
    apply_processors(LOGITS_PROCESSORS, changed, rows[:1])
    expected = exact_probabilities(changed[0], 1.2, min_p=0.02)
    counts = torch.bincount(
        torch.tensor(list(sample(logits.repeat(NUM_DRAWS, 1), rows).values())), minlength=VOCAB_SIZE
    )
    possible = expected > 0
    assert possible.nonzero().flatten().tolist() == [0, 1, 2, 5, 6, 8, 9]
    assert counts[~possible].sum() == 0
    frequencies = (expected[possible] * NUM_DRAWS).numpy()
    assert stats.chisquare(counts[possible].numpy(), frequencies).pvalue > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    list(itertools.product((0.3, 1.0, 3.0), (0, 2, 5, 11), (1.0, 0.95, 0.6, 0.1))),
)
def test_many_draws_along_one_sequence_follow_the_exact_distribution(
    temperature: float, top_k: int, top_p: float
) -> None:
    logits = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(9)) * 2
    output = [0] * 20_000
    counts = torch.zeros(VOCAB_SIZE)
    params: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    for start in range(0, 20_000, 1000):
        rows = [make_row(n, output=output[: start + n], seed=5, **params) for n in range(1000)]
        drawn = sample(logits.repeat(1000, 1), rows)
        counts += torch.bincount(torch.tensor(list(drawn.values())), minlength=VOCAB_SIZE)
    expected = exact_probabilities(logits, temperature, top_k, top_p)
    possible = expected > 0
    assert counts[~possible].sum() == 0
    frequencies = (expected[possible] * counts.sum()).numpy()
    if len(frequencies) > 1:
        assert stats.chisquare(counts[possible].numpy(), frequencies).pvalue > 1e-5


# More than the first candidates, and more than the second.
@pytest.mark.parametrize(("vocab_size", "slope"), [(1000, 1e-3), (7000, 1e-4)])
def test_flat_top_p_looks_beyond_the_candidates(vocab_size: int, slope: float) -> None:
    logits = torch.arange(float(vocab_size)).mul(-slope).repeat(500, 1)
    rows = [make_row(n, seed=n, temperature=1.0, top_p=0.9) for n in range(500)]
    drawn = set(sample(logits, rows).values())
    cumulated = logits[0].double().softmax(0).cumsum(0)
    num_kept = int((cumulated < 0.9).sum()) + 1
    assert num_kept * 0.97 < max(drawn) < num_kept


@pytest.mark.parametrize(("top_k", "top_p"), [(6, 1.0), (0, 0.9), (6, 0.9), (0, 1.0)])
def test_draws_from_a_large_vocabulary_follow_the_exact_distribution(top_k: int, top_p: float) -> None:
    logits = torch.full((600,), -9.0)
    places = torch.arange(37, 600, 61)
    logits[places] = torch.randn(len(places), generator=torch.Generator().manual_seed(8)) * 1.5
    num_draws = 8000
    params: dict[str, Any] = {"temperature": 0.9, "top_k": top_k, "top_p": top_p}
    drawn = sample(
        logits.repeat(num_draws, 1), [make_row(seed, seed=seed, **params) for seed in range(num_draws)]
    )
    counts = torch.bincount(torch.tensor(list(drawn.values())), minlength=600)
    expected = exact_probabilities(logits, 0.9, top_k, top_p)
    assert counts[expected == 0].sum() == 0
    # The improbable tokens are pooled.
    observed = [*counts[places].tolist(), int(counts.sum() - counts[places].sum())]
    wanted = [*expected[places].tolist(), float(1 - expected[places].sum())]
    cells = [(o, w * num_draws) for o, w in zip(observed, wanted, strict=True) if w > 1e-9]
    assert stats.chisquare(*zip(*cells, strict=True)).pvalue > 1e-4
