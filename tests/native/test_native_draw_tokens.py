"""Tokens drawn by native kernels are those that the plain op draws."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from naiad.models.native_picker import NativePicker
from naiad.sampling.sampler import Sampler
from naiad.sequence import SamplingParams
from naiad_kernels.best_tokens import best_tokens
from naiad_kernels.draw_tokens import Draws, draw_tokens
from naiad_kernels.kept_threshold import RowFilters
from naiad_kernels.native.library import Library, Team

SIZES = [1, 15, 16, 17, 63, 65, 390, 1003, 1025, 5000]
# Temperature, top-k, top-p, min-p.
SETTINGS = {
    "greedy": (0.0, 0, 1.0, 0.0),
    "free": (1.0, 0, 1.0, 0.0),
    "hot": (30.0, 0, 1.0, 0.0),
    "uniform": (1e38, 0, 1.0, 0.0),
    "cold": (1e-30, 0, 1.0, 0.0),
    "top-k": (0.8, 5, 1.0, 0.0),
    "wide top-k": (2.0, 50, 1.0, 0.0),
    "top-p": (0.7, 0, 0.9, 0.0),
    "narrow top-p": (1.0, 0, 1e-9, 0.0),
    "hot top-p": (1.5, 0, 0.5, 0.0),
    "min-p": (1.0, 0, 1.0, 0.05),
    "all filters": (0.9, 20, 0.8, 0.01),
    "top-p and min-p": (1.2, 0, 0.95, 0.02),
}


def draws_of(settings: list[tuple[float, int, float, float]], vocab_size: int) -> Draws:
    temperature, top_k, top_p, min_p = zip(*settings, strict=True)
    filters = RowFilters(
        torch.tensor(temperature, dtype=torch.float64),
        torch.tensor([min(each, vocab_size) for each in top_k]),
        torch.tensor(top_p, dtype=torch.float64),
        torch.tensor(min_p, dtype=torch.float64).log(),
    )
    keys = torch.randint(-(1 << 62), 1 << 62, (len(settings),), generator=torch.Generator().manual_seed(3))
    return Draws(filters, keys, torch.full((len(settings),), -7))


def found(team: Team, logits: torch.Tensor, draws: Draws, allowed: torch.Tensor | None = None) -> list[int]:
    made = replace(draws, token_ids=torch.full_like(draws.keys, -7))
    before = logits.clone()
    NativePicker(logits.shape[1], team)(logits, made, allowed)
    assert torch.equal(before.nan_to_num(7), logits.nan_to_num(7))
    return made.token_ids.tolist()


def expected(logits: torch.Tensor, draws: Draws, allowed: torch.Tensor | None = None) -> list[int]:
    made = replace(draws, token_ids=torch.empty_like(draws.keys))
    draw_tokens(logits, best_tokens(logits, allowed), made, allowed)
    return made.token_ids.tolist()


def mask_of(is_allowed: torch.Tensor) -> torch.Tensor:
    """`[num_rows, vocab_size]` bool as a bitmask."""
    padded = torch.nn.functional.pad(is_allowed, (0, -is_allowed.shape[1] % 32))
    return torch.from_numpy(np.packbits(padded.numpy(), axis=1, bitorder="little").view(np.int32))


def rows_of(vocab_size: int, num_rows: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(vocab_size + 1000 * seed)
    return 4 * torch.randn(num_rows, vocab_size, generator=generator)


@pytest.mark.parametrize("vocab_size", SIZES)
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_every_setting_draws_what_the_plain_op_draws(
    library: Library, num_threads: int, vocab_size: int
) -> None:
    team = library.new_team(num_threads)
    settings = 3 * list(SETTINGS.values())
    for seed in range(5):
        logits = rows_of(vocab_size, len(settings), seed)
        draws = draws_of(settings, vocab_size)
        assert found(team, logits, draws) == expected(logits, draws)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_ties_and_impossible_tokens(library: Library, num_threads: int) -> None:
    """Tokens that tie with the last one kept are kept, and those at -inf never drawn."""
    team = library.new_team(num_threads)
    settings = list(SETTINGS.values())
    for vocab_size in (17, 390, 3000):
        coarse = (rows_of(vocab_size, len(settings)) / 4).round()
        flat = torch.zeros(len(settings), vocab_size)
        few = coarse.masked_fill(rows_of(vocab_size, len(settings), 1) > -4, -torch.inf)
        few[:, vocab_size // 2] = 1.0
        for logits in (coarse, flat, few):
            draws = draws_of(settings, vocab_size)
            assert found(team, logits, draws) == expected(logits, draws)


@pytest.mark.parametrize("vocab_size", [1, 16, 17, 65, 390, 1025, 5000])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_only_what_a_bitmask_allows_is_drawn(library: Library, num_threads: int, vocab_size: int) -> None:
    """Masked rows beside free ones; what is left out may be the greatest, or no number at all."""
    team = library.new_team(num_threads)
    settings = 3 * list(SETTINGS.values())
    for share, bad in ((0.5, None), (0.01, None), (0.99, torch.nan), (0.3, torch.inf)):
        generator = torch.Generator().manual_seed(int(100 * share))
        is_allowed = torch.rand(len(settings), vocab_size, generator=generator) < share
        is_allowed[torch.arange(len(settings)), torch.arange(len(settings)) % vocab_size] = True
        is_allowed[::4] = True
        logits = rows_of(vocab_size, len(settings))
        if bad is not None:
            logits[~is_allowed] = bad
        draws, mask = draws_of(settings, vocab_size), mask_of(is_allowed)
        drawn = found(team, logits, draws, mask)
        assert drawn == expected(logits, draws, mask)
        assert all(is_allowed[row, token_id] for row, token_id in enumerate(drawn))


def test_a_row_for_which_nothing_is_allowed_changes_no_other(team: Team) -> None:
    settings = list(SETTINGS.values())
    logits, draws = rows_of(1003, len(settings)), draws_of(settings, 1003)
    is_allowed = rows_of(1003, len(settings), 1) > 0
    wanted = expected(logits, draws, mask_of(is_allowed))
    is_allowed[[1, 7, 12]] = False
    drawn = found(team, logits, draws, mask_of(is_allowed))
    usable = [index for index in range(len(settings)) if index not in (1, 7, 12)]
    assert [drawn[index] for index in usable] == [wanted[index] for index in usable]


def test_filters_that_keep_many_tokens(team: Team) -> None:
    """Of a large vocabulary: most settings need few tokens, flat rows and a wide top-k need more or all."""
    vocab_size = 20_000
    wide = [(5.0, 0, 0.99, 0.0), (1.0, 2000, 1.0, 0.0), (1.0, 2000, 0.9, 0.0), (9.0, 0, 1.0, 1e-3)]
    settings = [*SETTINGS.values(), *wide, (1.0, 0, 1 - 1e-9, 0.0), (1.0, 0, 1.0, 1e-12)]
    normal = rows_of(vocab_size, len(settings))
    for logits in (normal, normal / 8, torch.zeros_like(normal), normal.round()):
        draws = draws_of(settings, vocab_size)
        assert found(team, logits, draws) == expected(logits, draws)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_row_that_cannot_be_used_changes_no_other(team: Team, bad: float) -> None:
    settings = list(SETTINGS.values())
    logits = rows_of(1003, len(settings))
    draws = draws_of(settings, 1003)
    wanted = expected(logits, draws)
    for row in (1, 7, 12):
        logits[row, 500] = bad
    logits[4] = -torch.inf
    drawn = found(team, logits, draws)
    usable = [index for index in range(len(settings)) if index not in (1, 4, 7, 12)]
    assert [drawn[index] for index in usable] == [wanted[index] for index in usable]


def test_the_largest_random_number_has_finite_noise(team: Team) -> None:
    """A client chooses the seed; with this one the first 53 random bits of token 5 are ones."""
    vocab_size = 40
    for more in ({"top_p": 1e-3}, {"top_p": 1e-3, "top_k": 2}, {"allowed_token_ids": (5,)}, {}):
        params = SamplingParams(max_tokens=9, seed=9945940458597510396, temperature=1.0, **more)
        logits = torch.zeros(1, vocab_size)
        logits[0, 5] = 50.0
        for sampler in (Sampler(vocab_size), Sampler(vocab_size, pick=NativePicker(vocab_size, team))):
            row = sampler.new_row(0, params, 2)
            row.advance([3, 5, 8])
            assert sampler.sample(logits.clone(), [row]).sampled_token_ids == {0: 5}


def test_frequencies_are_the_probabilities(team: Team) -> None:
    """The bound on the noise leaves no token out: chi-square over many keys."""
    num_rows, vocab_size = 20_000, 40
    logits = (torch.arange(vocab_size) / 13).repeat(num_rows, 1)
    draws = draws_of([(1.0, 0, 1.0, 0.0)] * num_rows, vocab_size)
    counts = torch.bincount(torch.tensor(found(team, logits, draws)), minlength=vocab_size)
    wanted = num_rows * logits[0].double().softmax(0)
    statistic = ((counts - wanted) ** 2 / wanted).sum().item()
    degrees = vocab_size - 1
    assert statistic < degrees + 5 * math.sqrt(2 * degrees)


def test_large_random_batches(team: Team) -> None:
    generator = torch.Generator().manual_seed(9)
    for vocab_size in (200, 2500):
        settings = [
            (
                float(torch.rand(1, generator=generator)) * 3,
                int(torch.randint(0, 40, (1,), generator=generator)) * (seed % 2),
                1.0 if seed % 3 else float(torch.rand(1, generator=generator)) * 0.98 + 0.01,
                0.0 if seed % 5 else 0.1,
            )
            for seed in range(300)
        ]
        logits = rows_of(vocab_size, len(settings))
        draws = draws_of(settings, vocab_size)
        assert found(team, logits, draws) == expected(logits, draws)


CHANGES: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.3},
    {"logit_bias": ((3, 4.0), (7, -4.0))},
    {"allowed_token_ids": (1, 5, 9, 150)},
    {"top_n_sigma": 1.0},
    {"min_tokens": 3, "stop_token_ids": (1,)},
]


@pytest.mark.parametrize("vocab_size", [300, 12_000])
def test_a_sampler_that_picks_natively_samples_the_same(team: Team, vocab_size: int) -> None:
    """After processors too, among greedy rows and beams, and where the caller has to draw."""
    plain, native = Sampler(vocab_size), Sampler(vocab_size, pick=NativePicker(vocab_size, team))
    chance = random.Random(vocab_size)
    rows = []
    for index in range(120):
        temperature, top_k, top_p, min_p = chance.choice(list(SETTINGS.values()))
        more = chance.choice(CHANGES) | ({"num_candidates": 3} if index % 20 == 7 else {})
        top_p = 0.9999 if index % 9 == 0 else top_p
        params = SamplingParams(
            max_tokens=9, seed=index, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, **more
        )
        row = plain.new_row(index, params, 2)
        row.advance([3, 5, 8])
        rows.append(row)
    logits = rows_of(vocab_size, len(rows))
    one, other = plain.sample(logits.clone(), rows), native.sample(logits.clone(), rows)
    assert one.sampled_token_ids == other.sampled_token_ids
    assert len(one.sampled_token_ids) > 100
    assert one.candidates.keys() == other.candidates.keys()
    assert one.errors == other.errors == {}
