from __future__ import annotations

import pytest
import torch
from kernel_interpreter import Interpret
from kernel_tolerances import assert_close_to_reference

from naiad.sampling.sampler_output import best_token_ids
from naiad_kernels.top_log_probs import kernel, reference, top_log_probs


def logits_of(num_rows: int, vocab_size: int) -> torch.Tensor:
    torch.manual_seed(vocab_size)
    wide = torch.full((num_rows, vocab_size + 5), torch.nan)
    wide[:, :vocab_size] = torch.randn(num_rows, vocab_size) * 3
    return wide[:, :vocab_size]


def assert_equals_reference(
    interpret: Interpret, logits: torch.Tensor, chosen: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    actual = interpret(kernel.top_log_probs, logits, chosen, num_top)
    expected = reference.top_log_probs(logits, chosen, num_top)
    assert torch.equal(actual[1], expected[1])
    assert torch.equal(actual[1], best_token_ids(logits, num_top))
    for one, other in ((actual[0], expected[0]), (actual[2], expected[2])):
        assert torch.equal(one.isneginf(), other.isneginf())
        assert_close_to_reference(one.nan_to_num(neginf=0.0), other.nan_to_num(neginf=0.0))
    assert all(map(torch.equal, top_log_probs(logits, chosen, num_top), expected))
    return actual


@pytest.mark.parametrize("num_top", [0, 1, 5, 20, 64])
@pytest.mark.parametrize("vocab_size", [1, 97, 1024, 3001])
def test_logarithms_and_order(interpret: Interpret, vocab_size: int, num_top: int) -> None:
    chosen = torch.randint(vocab_size, (3,))
    assert_equals_reference(interpret, logits_of(3, vocab_size), chosen, min(num_top, vocab_size))


def test_no_rows(interpret: Interpret) -> None:
    chosen = torch.empty(0, dtype=torch.int64)
    assert_equals_reference(interpret, torch.empty(0, 7), chosen, 2)


def test_equal_tokens_come_by_id_across_tiles(interpret: Interpret) -> None:
    logits = torch.zeros(2, 2100)
    logits[0, 1::2] = -0.0
    logits[1, [5, 1023, 1024, 2099]] = 4.0
    logits[1, [3, 2050]] = 7.0
    _, top_ids, _ = assert_equals_reference(interpret, logits, torch.tensor([9, 3]), 6)
    assert top_ids.tolist() == [[0, 1, 2, 3, 4, 5], [3, 2050, 5, 1023, 1024, 2099]]


def test_impossible_tokens_are_last_and_minus_infinity(interpret: Interpret) -> None:
    logits = torch.full((2, 2100), -torch.inf)
    logits[0, 1500] = -3e38
    logits[1, [7, 2000]] = torch.tensor([88.0, -88.0])
    chosen, top_ids, top = assert_equals_reference(interpret, logits, torch.tensor([1500, 3]), 4)
    assert chosen.tolist() == [0.0, -torch.inf]
    assert top_ids.tolist() == [[1500, 0, 1, 2], [7, 2000, 0, 1]]
    assert top[:, 3].isneginf().all()


def test_large_logits_do_not_overflow(interpret: Interpret) -> None:
    logits = logits_of(2, 1500) + torch.tensor([[3e4], [-3e4]])
    assert_equals_reference(interpret, logits, torch.tensor([0, 1499]), 5)


def test_batch_mates_do_not_show(interpret: Interpret) -> None:
    logits, chosen = logits_of(4, 1300), torch.tensor([1, 2, 3, 4])
    together = interpret(kernel.top_log_probs, logits, chosen, 7)
    alone = interpret(kernel.top_log_probs, logits[2:3].clone(), chosen[2:3], 7)
    for all_of_them, one in zip(together, alone, strict=True):
        assert torch.equal(all_of_them[2:3], one)
