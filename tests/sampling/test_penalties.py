from __future__ import annotations

import torch
from transformers import RepetitionPenaltyLogitsProcessor

from helpers.sampling_rows import make_row
from naiad.sampling.penalties import apply_penalties, mask_stop_tokens


def random_logits(num_rows: int) -> torch.Tensor:
    return torch.randn(num_rows, 30, generator=torch.Generator().manual_seed(0))


def test_repetition_penalty_is_that_of_transformers() -> None:
    logits = random_logits(3)
    rows = [
        make_row(0, prompt=[1, 2, 2], output=[3, 1], repetition_penalty=1.3),
        make_row(1, prompt=[1, 2]),
        make_row(2, prompt=[29], output=[0, 0, 7], repetition_penalty=0.7),
    ]
    expected = logits.clone()
    for index in (0, 2):
        processor = RepetitionPenaltyLogitsProcessor(rows[index].params.repetition_penalty)
        ids = torch.tensor([rows[index].token_ids])
        expected[index] = processor(ids, logits[index : index + 1].clone())[0]
    apply_penalties(logits, rows)
    assert torch.equal(logits, expected)


def test_presence_and_frequency_count_the_output_only() -> None:
    logits = random_logits(2)
    expected = logits.clone()
    expected[1, 4] -= 0.5 + 3 * 0.25
    expected[1, 6] -= 0.5 + 0.25
    rows = [
        make_row(0, output=[4, 4]),
        make_row(1, prompt=[4, 9, 9], output=[4, 6, 4, 4], presence_penalty=0.5, frequency_penalty=0.25),
    ]
    apply_penalties(logits, rows)
    torch.testing.assert_close(logits, expected)


def test_repetition_comes_before_the_subtractions() -> None:
    logits = torch.full((1, 5), 2.0)
    apply_penalties(logits, [make_row(output=[1], repetition_penalty=2.0, presence_penalty=0.5)])
    assert logits[0, 1] == 0.5


def test_before_the_first_output_token_nothing_is_counted() -> None:
    logits = random_logits(1)
    expected = logits.clone()
    apply_penalties(logits, [make_row(prompt=[3], presence_penalty=1.0)])
    assert torch.equal(logits, expected)


def test_min_tokens_masks_stop_ids_until_it_is_reached() -> None:
    logits = torch.zeros(3, 6)
    params = {"min_tokens": 2, "stop_token_ids": (1, 4)}
    rows = [make_row(0, output=[3], **params), make_row(1, output=[3, 3], **params), make_row(2)]
    mask_stop_tokens(logits, rows)
    assert logits[0].isneginf().nonzero().flatten().tolist() == [1, 4]
    assert logits[1:].isfinite().all()


def test_stop_ids_outside_the_vocabulary_mask_nothing() -> None:
    logits = torch.zeros(1, 6)
    mask_stop_tokens(logits, [make_row(min_tokens=2, stop_token_ids=(6, -1))])
    assert logits.isfinite().all()
