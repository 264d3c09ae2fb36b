from __future__ import annotations

import torch
from scipy import stats

from naiad.sampling.noise import gumbel_noise, noise_key


def make_keys(pairs: list[tuple[int, int]]) -> torch.Tensor:
    return torch.tensor([noise_key(seed, position) for seed, position in pairs]).unsqueeze(1)


def test_noise_of_a_token_is_the_same_whichever_tokens_are_asked_for() -> None:
    keys = make_keys([(1, 2), (2**64 - 1, 0)])
    everything = gumbel_noise(keys, torch.arange(1000))
    some = torch.tensor([[999, 3, 0], [7, 500, 1]])
    assert torch.equal(gumbel_noise(keys, some), everything.gather(1, some))


def test_noise_is_gumbel_distributed() -> None:
    noise = gumbel_noise(make_keys([(7, 7)]), torch.arange(50_000)).flatten()
    assert stats.kstest(noise.numpy(), stats.gumbel_r.cdf).pvalue > 1e-4


def test_noise_over_seeds_and_positions_is_gumbel_distributed() -> None:
    for pairs in ([(seed, 3) for seed in range(20_000)], [(3, position) for position in range(20_000)]):
        noise = gumbel_noise(make_keys(pairs), torch.tensor([11])).flatten()
        assert stats.kstest(noise.numpy(), stats.gumbel_r.cdf).pvalue > 1e-4


def test_neighbouring_keys_and_tokens_are_uncorrelated() -> None:
    noise = gumbel_noise(make_keys([(seed, 5) for seed in range(300)]), torch.arange(300))
    for shifted, kept in ((noise[1:], noise[:-1]), (noise[:, 1:], noise[:, :-1])):
        correlation = stats.pearsonr(shifted.flatten().numpy(), kept.flatten().numpy()).statistic
        assert abs(correlation) < 0.02


def test_seeds_and_positions_do_not_collide() -> None:
    pairs = [(seed, position) for seed in range(300) for position in range(300)]
    assert len({noise_key(*pair) for pair in pairs}) == len(pairs)
