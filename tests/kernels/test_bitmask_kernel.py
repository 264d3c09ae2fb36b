from __future__ import annotations

import pytest
import torch
from kernel_interpreter import Interpret

from naiad_kernels.apply_bitmask import apply_bitmask, kernel, reference


def case(
    num_rows: int, vocab_size: int, num_spare_words: int
) -> tuple[torch.Tensor, list[int], torch.Tensor]:
    torch.manual_seed(vocab_size)
    logits = torch.randn(num_rows, vocab_size)
    rows = list(range(num_rows))[::2][::-1]
    num_words = -(-vocab_size // 32) + num_spare_words
    allowed = torch.randint(-(2**31), 2**31 - 1, (len(rows), num_words), dtype=torch.int32)
    return logits, rows, allowed


@pytest.mark.parametrize(
    ("num_rows", "vocab_size", "num_spare_words"),
    [(1, 1, 0), (2, 31, 1), (3, 32, 0), (5, 33, 0), (3, 97, 2), (4, 1024, 0), (5, 1025, 0), (2, 5000, 3)],
)
def test_masks_as_the_reference_does(
    interpret: Interpret, num_rows: int, vocab_size: int, num_spare_words: int
) -> None:
    logits, rows, allowed = case(num_rows, vocab_size, num_spare_words)
    expected = logits.clone()
    for place, row in enumerate(rows):
        for token_id in range(vocab_size):
            if not (int(allowed[place, token_id // 32]) >> token_id % 32) & 1:
                expected[row, token_id] = -torch.inf
    by_reference, on_host, by_kernel = logits.clone(), logits.clone(), logits.clone()
    reference.apply_bitmask(by_reference, torch.tensor(rows), allowed)
    apply_bitmask(on_host, rows, allowed)
    interpret(kernel.apply_bitmask, by_kernel.share_memory_(), torch.tensor(rows), allowed)
    assert torch.equal(by_reference, expected)
    assert torch.equal(on_host, expected)
    assert torch.equal(by_kernel, expected)


def test_rows_of_a_wider_tensor_are_masked_in_place(interpret: Interpret) -> None:
    wide = torch.zeros(3, 80)
    other = wide.clone().share_memory_()
    allowed = torch.zeros(1, 3, dtype=torch.int32)
    apply_bitmask(wide[:, :70], [1], allowed)
    interpret(kernel.apply_bitmask, other[:, :70], torch.tensor([1]), allowed)
    expected = torch.zeros(3, 80)
    expected[1, :70] = -torch.inf
    assert torch.equal(wide, expected)
    assert torch.equal(other, expected)


def test_not_a_number_stays_where_it_is_allowed() -> None:
    logits = torch.full((1, 3), torch.nan)
    apply_bitmask(logits, [0], torch.tensor([[0b001]], dtype=torch.int32))
    assert logits.isnan().tolist() == [[True, False, False]]
