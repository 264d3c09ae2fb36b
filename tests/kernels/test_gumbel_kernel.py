from __future__ import annotations

import pytest
import torch
from kernel_interpreter import Interpret

from naiad.sampling import noise
from naiad_kernels.gumbel_argmax import gumbel_argmax, kernel, reference


def arguments(num_rows: int, vocab_size: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    logits = torch.randn(num_rows, vocab_size + 3)[:, :vocab_size] * 3
    keys = torch.tensor([noise.noise_key(seed, 7) for seed in range(num_rows)], dtype=torch.int64)
    temperature = torch.rand(num_rows, dtype=torch.float64) + 0.1
    threshold = torch.full_like(temperature, -torch.inf)
    best = logits.amax(1) if num_rows else torch.empty(0)
    return [logits, best, temperature, threshold, keys]


def test_noise_is_that_of_the_sampler() -> None:
    keys = torch.tensor([noise.noise_key(seed, 3) for seed in (0, 1, 2**64 - 1)])
    expected = noise.gumbel_noise(keys[:, None], torch.arange(1000))
    assert torch.equal(reference.gumbel_noise(keys, 1000), expected)


@pytest.mark.parametrize(
    ("num_rows", "vocab_size"), [(0, 5), (1, 1), (3, 97), (2, 1024), (5, 1025), (4, 5000)]
)
def test_draws_equal_the_reference(interpret: Interpret, num_rows: int, vocab_size: int) -> None:
    given = arguments(num_rows, vocab_size)
    actual = interpret(kernel.gumbel_argmax, *given)
    assert torch.equal(actual, reference.gumbel_argmax(*given))
    assert torch.equal(actual, gumbel_argmax(*given))


def test_noise_equals_the_reference_to_the_last_digits(interpret: Interpret) -> None:
    keys = torch.tensor([noise.noise_key(seed, 0) for seed in range(2)])
    actual = interpret(_kernel_noise, keys, 1024)
    torch.testing.assert_close(actual, reference.gumbel_noise(keys, 1024), rtol=1e-14, atol=1e-14)


def test_only_tokens_at_or_above_the_threshold_are_drawn(interpret: Interpret) -> None:
    given = arguments(64, 50)
    logits, best, temperature, threshold, _ = given
    scaled = (logits.double() - best[:, None]) / temperature[:, None]
    threshold.copy_(scaled.topk(3, dim=1).values[:, -1])
    actual = interpret(kernel.gumbel_argmax, *given)
    assert (scaled.gather(1, actual[:, None])[:, 0] >= threshold).all()
    assert torch.equal(actual, reference.gumbel_argmax(*given))
    threshold.zero_()
    assert torch.equal(interpret(kernel.gumbel_argmax, *given), logits.argmax(1))


def test_a_token_of_minus_infinity_is_never_drawn(interpret: Interpret) -> None:
    given = arguments(4, 1030)
    given[0][:, :-1] = -torch.inf
    given[1].copy_(given[0].amax(1))
    assert interpret(kernel.gumbel_argmax, *given).tolist() == [1029] * 4


def test_batch_mates_do_not_show(interpret: Interpret) -> None:
    given = arguments(6, 300)
    together = interpret(kernel.gumbel_argmax, *given)
    alone = interpret(kernel.gumbel_argmax, *(part[3:4].clone() for part in given))
    assert together[3] == alone[0]


def test_draws_follow_the_softmax() -> None:
    num_rows = 20_000
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0]).repeat(num_rows, 1)
    keys = torch.tensor([noise.noise_key(5, position) for position in range(num_rows)])
    ones = torch.ones(num_rows, dtype=torch.float64)
    drawn = gumbel_argmax(logits, logits.amax(1), ones, -ones * torch.inf, keys)
    expected = logits[0].double().softmax(0) * num_rows
    chi_square = ((drawn.bincount(minlength=4) - expected) ** 2 / expected).sum()
    assert chi_square < 16.3  # 3 degrees of freedom, p = 0.001


def _kernel_noise(keys: torch.Tensor, vocab_size: int) -> torch.Tensor:
    import triton
    from noise_probe_kernel import noise_probe_kernel

    out = torch.empty(len(keys), vocab_size, dtype=torch.float64)
    noise_probe_kernel[(len(keys),)](out, keys, TILE=triton.next_power_of_2(vocab_size))
    return out
