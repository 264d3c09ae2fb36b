"""Rows for the sampler's tests."""

from __future__ import annotations

from typing import Any

from naiad.sampling.filters import TOP_P_RESET
from naiad.sampling.logits_processors import LOGITS_PROCESSORS
from naiad.sampling.row_state import RowState, new_row
from naiad.sequence import SamplingParams


class TextRow(RowState):
    """A row that also has its tokens, from which tests compute the expected result."""

    token_ids: list[int]


def make_row(
    sequence_id: int = 0, prompt: list[int] | None = None, output: list[int] | None = None, **params: Any
) -> TextRow:
    prompt = prompt or [0]
    return text_row(sequence_id, SamplingParams(max_tokens=1000, **params), prompt, output or [])


def text_row(sequence_id: int, params: SamplingParams, prompt: list[int], output: list[int]) -> TextRow:
    made = new_row((*LOGITS_PROCESSORS, TOP_P_RESET), sequence_id, params, len(prompt))
    row = TextRow(sequence_id, params, len(prompt), made.states)
    row.token_ids = prompt + output
    row.advance(row.token_ids)
    return row
