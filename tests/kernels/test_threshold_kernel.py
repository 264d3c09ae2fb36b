from __future__ import annotations

import pytest
import torch
from kernel_interpreter import Interpret

from naiad_kernels.kept_threshold import RowFilters, kept_threshold, kernel, reference


def rows(
    num_rows: int, top_k: float = 0, top_p: float = 1.0, min_p: float = 0.0, temperature: float = 0.8
) -> tuple[torch.Tensor, ...]:
    def full(value: float) -> torch.Tensor:
        return torch.full((num_rows,), value, dtype=torch.float64)

    return full(temperature), full(top_k).long(), full(top_p), full(min_p).log()


def logits_of(num_rows: int, vocab_size: int) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(num_rows, vocab_size) * 2


def assert_equal_thresholds(
    interpret: Interpret, logits: torch.Tensor, filters: tuple[torch.Tensor, ...]
) -> torch.Tensor:
    best = logits.amax(1) if len(logits) else torch.empty(0)
    actual = interpret(kernel.kept_threshold, logits, best, *filters)
    assert torch.equal(actual, reference.kept_threshold(logits, best, *filters))
    assert torch.equal(actual, kept_threshold(logits, best, RowFilters(*filters)))
    return actual


@pytest.mark.parametrize("vocab_size", [1, 97, 5000])
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [
        (0, 1.0, 0.0),
        (1, 1.0, 0.0),
        (40, 1.0, 0.0),
        (0, 0.9, 0.0),
        (0, 1.0, 0.1),
        (30, 0.7, 0.02),
        (5, 0.01, 0.0),
    ],
)
def test_thresholds(interpret: Interpret, vocab_size: int, top_k: int, top_p: float, min_p: float) -> None:
    logits = logits_of(2, vocab_size)
    assert_equal_thresholds(interpret, logits, rows(2, min(top_k, vocab_size), top_p, min_p))


def test_rows_have_their_own_filters(interpret: Interpret) -> None:
    filters = [rows(1), rows(1, 3), rows(1, 0, 0.5), rows(1, 0, 1.0, 0.3), rows(1, 20, 0.9, 0.0, 2.0)]
    merged = tuple(torch.cat(parts) for parts in zip(*filters, strict=True))
    thresholds = assert_equal_thresholds(interpret, logits_of(5, 300), merged)
    assert thresholds[0] == -torch.inf


def test_no_rows(interpret: Interpret) -> None:
    assert_equal_thresholds(interpret, torch.empty(0, 7), rows(0))


def test_the_kth_and_its_ties_are_kept(interpret: Interpret) -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0, -1.0, 0.0, -0.0]])
    for top_k in range(1, 9):
        threshold = assert_equal_thresholds(interpret, logits, rows(1, top_k, temperature=1.0))
        assert threshold.item() == logits[0].sort(descending=True).values[top_k - 1] - 3.0


def test_negative_and_impossible_logits(interpret: Interpret) -> None:
    logits = torch.tensor([[-5.0, -torch.inf, -7.0, -6.0, -torch.inf, -3e38]])
    for filters in (rows(1, 2), rows(1, 4), rows(1, 0, 0.99), rows(1, 3, 0.999)):
        assert_equal_thresholds(interpret, logits, filters)
    assert assert_equal_thresholds(interpret, logits, rows(1, 6)).item() == -torch.inf


def test_top_p_keeps_the_fewest_tokens_with_the_mass(interpret: Interpret) -> None:
    logits = logits_of(1, 200)
    for top_p in (0.05, 0.3, 0.6, 0.95):
        threshold = assert_equal_thresholds(interpret, logits, rows(1, 0, top_p, temperature=1.0))
        probabilities = logits[0].double().softmax(0)
        kept = probabilities[(logits[0].double() - logits.max()) >= threshold]
        assert kept.sum() >= top_p > kept.sum() - kept.min()


def test_a_wider_row_is_read_in_place(interpret: Interpret) -> None:
    wide = torch.full((3, 70), torch.nan)
    wide[:, :50] = logits_of(3, 50)
    assert_equal_thresholds(interpret, wide[:, :50], rows(3, 7, 0.8))
