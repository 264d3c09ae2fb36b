"""Rows for the sampler's tests."""

from __future__ import annotations

from typing import Any

from naiad.sequence import SamplingParams, Sequence


def make_row(
    sequence_id: int = 0, prompt: list[int] | None = None, output: list[int] | None = None, **params: Any
) -> Sequence:
    prompt = prompt or [0]
    return Sequence(
        sequence_id=sequence_id,
        token_ids=prompt + (output or []),
        num_prompt_tokens=len(prompt),
        params=SamplingParams(max_tokens=1000, **params),
        arrival_s=0.0,
    )
