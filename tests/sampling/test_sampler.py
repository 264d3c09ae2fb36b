from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.sampling_rows import TextRow, make_row
from naiad.sampling import draw
from naiad.sampling.sampler import Sampler


def sample(logits: Tensor, rows: list[TextRow]) -> dict[int, int]:
    output = Sampler(logits.shape[1]).sample(logits.clone(), rows)
    assert not output.errors
    return output.sampled_token_ids


MIXED_PARAMS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_k": 40},
    {"temperature": 1.0, "top_k": 700},
    {"temperature": 2.5, "top_p": 0.9},
    {"temperature": 0.7, "top_p": 0.5},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.3, "top_k": 90, "top_p": 0.7, "repetition_penalty": 1.3},
    {"temperature": 0.9, "presence_penalty": 1.0, "frequency_penalty": -0.5},
    {"temperature": 1.0, "min_tokens": 9, "stop_token_ids": (4, 5)},
    {"temperature": 1.8, "min_p": 0.05},
    {"temperature": 3.0, "min_p": 0.01, "top_k": 400, "top_p": 0.99},
    {"bad_words": ((3, 5), (8,), (7, 7)), "logit_bias": ((9, 4.0), (10, 4.0))},
    {"temperature": 1.1, "allowed_token_ids": tuple(range(0, 1500, 3)), "top_p": 0.95},
    {"temperature": 1.0, "num_log_probs": 3},
    {"num_log_probs": 20, "returns_generation_logits": True, "repetition_penalty": 1.5},
]


def mixed_batch(num_rows: int) -> tuple[Tensor, list[TextRow]]:
    logits = torch.randn(num_rows, 1500, generator=torch.Generator().manual_seed(1)) * 3
    # Ties, as from low precision.
    logits = (logits * 4).round() / 4
    rows = [
        make_row(n, prompt=[n, n, 7], output=[3, n, 3], seed=n, **MIXED_PARAMS[n % len(MIXED_PARAMS)])
        for n in range(num_rows)
    ]
    return logits, rows


def test_a_row_does_not_depend_on_its_batch_mates() -> None:
    logits, rows = mixed_batch(60)
    together = sample(logits, rows)
    alone = {n: sample(logits[n : n + 1], [rows[n]])[n] for n in range(60)}
    assert together == alone


def test_a_row_does_not_depend_on_its_place() -> None:
    logits, rows = mixed_batch(60)
    order = torch.randperm(60, generator=torch.Generator().manual_seed(2)).tolist()
    assert sample(logits[order], [rows[n] for n in order]) == sample(logits, rows)


def test_another_seed_or_position_draws_anew() -> None:
    logits = torch.zeros(3, 1000)
    rows = [make_row(0, seed=1, temperature=1.0), make_row(1, seed=2, temperature=1.0)]
    rows.append(make_row(2, output=[5], seed=1, temperature=1.0))
    assert len(set(sample(logits, rows).values())) == 3


def test_greedy_takes_the_first_of_the_best() -> None:
    logits = torch.zeros(40, 5000)
    for n in range(40):
        logits[n, [100 * n + 7, 100 * n + 8, 4900]] = 4.0
    rows = [make_row(n) for n in range(40)]
    assert sample(logits, rows) == {n: 100 * n + 7 for n in range(40)}


@pytest.mark.parametrize("temperature", [1e-3, 1e-12, 1e-300])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    logits = torch.randn(50, 300, generator=torch.Generator().manual_seed(4)) * 30
    rows = [make_row(n, seed=n, temperature=temperature) for n in range(50)]
    assert list(sample(logits, rows).values()) == logits.argmax(1).tolist()


MASKS: list[dict[str, Any]] = [
    {},
    {"bad_words": ((0,), (4, 1))},
    {"allowed_token_ids": (2, 5, 299)},
    {"min_tokens": 3, "stop_token_ids": (0, 1)},
    {"bad_words": ((0,), (1,)), "logit_bias": ((0, 90.0), (1, 90.0), (7, 90.0))},
]
DRAWS: list[dict[str, Any]] = [
    {},
    {"temperature": 5.0},
    {"temperature": 5.0, "top_k": 5},
    {"temperature": 5.0, "top_p": 0.99},
    {"temperature": 5.0, "min_p": 1e-9},
    {"temperature": 1e5, "top_k": 290, "top_p": 0.999999, "min_p": 1e-30},
]


@pytest.mark.parametrize("drawing", DRAWS, ids=lambda drawing: "+".join(drawing) or "greedy")
@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: "+".join(mask) or "none")
def test_a_masked_token_is_never_drawn(mask: dict[str, Any], drawing: dict[str, Any]) -> None:
    logits = torch.zeros(400, 300)
    logits[:, 3:] = float("-inf")
    rows = [make_row(n, output=[4], seed=n, **mask, **drawing) for n in range(400)]
    assert set(sample(logits, rows).values()) <= ({2} if mask else {0, 1, 2})


def test_few_possible_tokens_are_found_without_sorting_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    widths: list[int] = []
    draw_filtered = draw._draw_filtered
    monkeypatch.setattr(
        draw, "_draw_filtered", lambda rows, width: widths.append(width) or draw_filtered(rows, width)
    )
    params = {"temperature": 1.0, "top_k": 50, "top_p": 0.9, "allowed_token_ids": (3, 4, 5)}
    sample(torch.zeros(1, 50_000), [make_row(**params)])
    assert widths == [256]


def test_tokens_that_tie_with_the_kth_are_kept_beyond_the_candidates() -> None:
    logits = torch.zeros(3000, 1000)
    logits[:, 0] = 1.0
    rows = [make_row(n, seed=n, temperature=1.0, top_k=3, top_p=0.999999) for n in range(3000)]
    assert len(set(sample(logits, rows).values())) > 900


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 1.0},
        {"temperature": 1.0, "top_k": 3, "top_p": 0.5},
        {"temperature": 1.0, "min_p": 0.1, "num_log_probs": 4, "returns_generation_logits": True},
        {"repetition_penalty": 1.3, "logit_bias": ((2, 1.0),), "bad_words": ((4,),)},
    ],
)
def test_a_bad_row_fails_alone(bad: float, params: dict[str, Any]) -> None:
    logits = torch.randn(3, 20, generator=torch.Generator().manual_seed(5))
    rows = [make_row(n, seed=n, **params) for n in range(3)]
    expected = sample(logits, rows)
    logits[1, 13] = bad
    output = Sampler(20).sample(logits, rows)
    assert list(output.errors) == [1]
    assert output.sampled_token_ids == {0: expected[0], 2: expected[2]}


def test_a_row_without_a_possible_token_fails() -> None:
    output = Sampler(20).sample(torch.full((1, 20), float("-inf")), [make_row(temperature=1.0)])
    assert str(output.errors[0]) == "the model's output for this request is not finite"


@pytest.mark.parametrize("drawing", DRAWS, ids=lambda drawing: "+".join(drawing) or "greedy")
@pytest.mark.parametrize(
    "params",
    [
        {"allowed_token_ids": (3,), "bad_words": ((3,),)},
        {"allowed_token_ids": (3,), "min_tokens": 5, "stop_token_ids": (3,), "logit_bias": ((3, 5.0),)},
        {"bad_words": tuple((n,) for n in range(20))},
    ],
)
def test_a_row_that_excludes_every_token_fails_alone(params: dict[str, Any], drawing: dict[str, Any]) -> None:
    logits = torch.randn(3, 20, generator=torch.Generator().manual_seed(5))
    mates = [make_row(0, seed=0, **drawing), make_row(2, seed=2, **drawing)]
    expected = sample(logits[[0, 2]], mates)
    output = Sampler(20).sample(
        logits, [mates[0], make_row(1, num_log_probs=2, **params, **drawing), mates[1]]
    )
    assert output.sampled_token_ids == expected
    assert list(output.errors) == [1]
    assert "excludes every token" in str(output.errors[1])
    assert output.errors[1].status == "INVALID_ARG"
    assert not output.log_probs


def test_no_rows() -> None:
    assert sample(torch.zeros(0, 20), []) == {}


def test_candidates_are_possible_tokens_and_a_beam_may_have_none() -> None:
    rows = [
        make_row(0, num_candidates=4, allowed_token_ids=(3, 5)),
        make_row(1, num_candidates=4, allowed_token_ids=(3,), bad_words=((3,),)),
        make_row(2, num_candidates=4),
    ]
    logits = torch.randn(3, 20, generator=torch.Generator().manual_seed(5))
    logits[2, 7] = math.nan
    output = Sampler(20).sample(logits, rows)
    assert {token_id for token_id, _ in output.candidates[0]} == {3, 5}
    assert all(math.isfinite(log_prob) for _, log_prob in output.candidates[0])
    assert output.candidates[1] == []
    assert list(output.errors) == [2]


@pytest.mark.parametrize("temperature", [1e38, 1e39, 1e300])
@pytest.mark.parametrize("top_p", [1.0, 0.999])
def test_a_temperature_beyond_float32_draws_evenly_among_what_is_possible(
    temperature: float, top_p: float
) -> None:
    params: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "allowed_token_ids": (2, 3, 5, 7)}
    rows = [make_row(n, seed=n, **params) for n in range(2000)]
    drawn = list(sample(torch.arange(20.0).repeat(2000, 1), rows).values())
    assert [400 < drawn.count(token_id) < 600 for token_id in (2, 3, 5, 7)] == [True] * 4
