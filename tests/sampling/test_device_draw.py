from __future__ import annotations

import random

import pytest
import torch

from helpers.sampling_rows import TextRow, make_row
from naiad.sampling.draw import draw, draw_on_device
from naiad.sequence import TopPDecay

VOCAB = 700


def random_rows(chance: random.Random, num_rows: int) -> list[TextRow]:
    return [
        make_row(
            index,
            prompt=[1] * chance.randint(1, 9),
            output=[chance.randrange(4) for _ in range(chance.randint(0, 5))],
            temperature=chance.choice([1e-40, 0.3, 1.0, 2.5, 1e39]),
            top_k=chance.choice([0, 0, 2, 50, 10_000]),
            top_p=chance.choice([1.0, 1.0, 0.9, 0.1]),
            top_p_decay=chance.choice([None, None, TopPDecay(0.7, 0.1, 3)]),
            min_p=chance.choice([0.0, 0.0, 0.2]),
            seed=chance.randrange(1 << 64),
        )
        for index in range(num_rows)
    ]


@pytest.mark.parametrize("is_filtered", [True, False])
@pytest.mark.parametrize("num_drawn", [1, 17, 40])
def test_ids_are_those_of_the_plain_way(num_drawn: int, is_filtered: bool) -> None:
    chance = random.Random(num_drawn)
    torch.manual_seed(num_drawn)
    rows = random_rows(chance, 40)
    if not is_filtered:
        rows = [make_row(index, temperature=0.8, seed=index) for index in range(40)]
    drawn = sorted(chance.sample(range(40), num_drawn))
    logits = torch.randn(40, VOCAB) * 4
    expected = logits.argmax(1)
    actual = expected.clone()
    best = logits.amax(1)
    draw(logits, best, rows, drawn, expected)
    draw_on_device(logits, best, rows, drawn, actual)
    assert actual.tolist() == expected.tolist()


def test_a_row_that_can_not_be_used_leaves_the_others_alone() -> None:
    torch.manual_seed(0)
    rows = random_rows(random.Random(0), 6)
    logits = torch.randn(6, VOCAB)
    expected, actual = logits.argmax(1), logits.argmax(1)
    draw(logits, logits.amax(1), rows, [0, 2, 4], expected)
    logits[1], logits[3, 5], logits[5] = float("-inf"), float("nan"), float("inf")
    draw_on_device(logits, logits.amax(1), rows, list(range(6)), actual)
    assert actual[[0, 2, 4]].tolist() == expected[[0, 2, 4]].tolist()
