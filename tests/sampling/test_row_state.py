from __future__ import annotations

from typing import Any

import pytest
import torch

from helpers.sampling_rows import make_row
from naiad.sampling.logits_processors import LOGITS_PROCESSORS, apply_processors
from naiad.sampling.row_state import RowState
from naiad.sampling.sampler import Sampler
from naiad.sequence import SamplingParams, TopPDecay

VOCAB_SIZE = 30
PROMPT, OUTPUT = [1, 2, 2, 9], [3, 1, 5, 6, 3]
SETTINGS: dict[str, Any] = {
    "repetition_penalty": 1.3,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.25,
    "bad_words": ((3, 7), (6, 3, 8)),
}


def processed(row: RowState) -> torch.Tensor:
    logits = torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(0)) * 3
    apply_processors(LOGITS_PROCESSORS, logits, [row])
    return logits


def new_row(**changes: Any) -> RowState:
    params = SamplingParams(max_tokens=9, **{**SETTINGS, **changes})
    return Sampler(VOCAB_SIZE).new_row(7, params, len(PROMPT))


@pytest.mark.parametrize("size", [1, 2, 3, 5, 9])
def test_tokens_may_come_in_any_pieces(size: int) -> None:
    row, text = new_row(), PROMPT + OUTPUT
    for start in range(0, len(text), size):
        row.advance(text[start : start + size])
    assert (row.num_tokens, row.num_output_tokens) == (9, 5)
    assert torch.equal(processed(row), processed(make_row(prompt=PROMPT, output=OUTPUT, **SETTINGS)))


def test_a_place_of_a_draft_leaves_the_row_as_it_was() -> None:
    row = new_row()
    row.advance(PROMPT + OUTPUT)
    before = processed(row)
    view = row.at(-1, [8]).at(-2, [3, 6])
    assert (view.sequence_id, view.num_tokens, row.num_tokens) == (-2, 12, 9)
    expected = make_row(prompt=PROMPT, output=[*OUTPUT, 8, 3, 6], **SETTINGS)
    assert torch.equal(processed(view), processed(expected))
    assert torch.equal(processed(row), before)


def test_a_clone_goes_on_with_its_own_tokens_and_noise() -> None:
    row = new_row(seed=1)
    row.advance(PROMPT)
    clone = row.clone(8, SamplingParams(max_tokens=9, seed=2, **SETTINGS))
    row.advance([3])
    clone.advance([4])
    for each, token_id, seed in ((row, 3, 1), (clone, 4, 2)):
        expected = make_row(prompt=PROMPT, output=[token_id], seed=seed, **SETTINGS)
        assert torch.equal(processed(each), processed(expected))
        assert each.noise == expected.noise


@pytest.mark.parametrize(
    ("params", "num_states"),
    [
        ({"temperature": 1.0, "top_p": 0.9, "min_tokens": 3, "stop_token_ids": (1,)}, 0),
        ({"logit_bias": ((1, 2.0),), "allowed_token_ids": (1, 2)}, 0),
        ({"top_p_decay": TopPDecay(0.5, 0.1, reset_id=3)}, 1),
        (SETTINGS, 3),
    ],
)
def test_a_row_keeps_only_what_it_asks_for(params: dict[str, Any], num_states: int) -> None:
    row = Sampler(VOCAB_SIZE).new_row(7, SamplingParams(max_tokens=9, **params), 1)
    assert len(row.states) == num_states
