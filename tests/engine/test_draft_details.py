"""Drafts do not change the details of an output: log-probabilities, logits, cumulative sums."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.drafting_engines import engine_parts, write_first_layers
from helpers.tiny_models import make_tiny_model
from naiad.models.native_model import NativeModel
from naiad.outputs import RequestOutput
from naiad.sequence import EngineRequest, SamplingParams

NUM_TOKENS = 30
PROMPT = [5, 6, 7, 8, 9, 5, 6, 7, 8]
# Of torch's ops in float32, summed in another order where a window has several rows; native kernels keep one.
TOLERANCE = 2e-4
SETTINGS: list[dict[str, Any]] = [
    {"num_log_probs": 3},
    {"num_log_probs": 0, "temperature": 1.2, "repetition_penalty": 1.3},
    {"returns_generation_logits": True, "returns_context_logits": True},
    {"num_log_probs": 5, "returns_generation_logits": True, "temperature": 0.9, "top_p": 0.9},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny_model(folder / "target")
    write_first_layers(folder / "target", folder / "first_layer", 1)
    return folder


def outputs_of(folder: Path, **settings: Any) -> tuple[dict[int, RequestOutput], int, float]:
    """Each request's outputs merged into one, the number of accepted drafts, and what they may change."""
    engine, runner = engine_parts(folder / "target", **settings)
    for number, asked in enumerate(SETTINGS):
        params = SamplingParams(max_tokens=NUM_TOKENS, seed=number, **asked)
        engine.add_request(EngineRequest(sequence_id=number, prompt_token_ids=PROMPT, params=params))
    whole = {number: RequestOutput(number, []) for number in range(len(SETTINGS))}
    while engine.has_work:
        for output in engine.step():
            made = whole[output.sequence_id]
            made.token_ids = made.token_ids + output.token_ids
            made.log_probs = made.log_probs + output.log_probs
            made.generation_logits = made.generation_logits + output.generation_logits
            made.context_logits += output.context_logits
            made.cum_log_prob = output.cum_log_prob
    tolerance = 0.0 if isinstance(runner._model, NativeModel) else TOLERANCE
    return whole, sum(engine.stats().total_accepted_tokens_at), tolerance


@pytest.mark.parametrize("drafter", ["ngram", "itself", "first_layer"])
def test_all_details_are_those_without_drafts(folder: Path, drafter: str) -> None:
    names = {"itself": "target", "first_layer": "first_layer"}
    settings: dict[str, Any] = {"drafter": "ngram"}
    if drafter in names:
        settings = {"drafter": "draft_model", "draft_model": str(folder / names[drafter])}
    plain, _, tolerance = outputs_of(folder)
    drafted, num_accepted, _ = outputs_of(folder, **settings)
    assert num_accepted > 0
    for number, asked in enumerate(SETTINGS):
        left, right = plain[number], drafted[number]
        assert left.token_ids == right.token_ids
        assert len(right.log_probs) == (NUM_TOKENS if "num_log_probs" in asked else 0)
        assert [each.top_token_ids for each in left.log_probs] == [
            each.top_token_ids for each in right.log_probs
        ]
        for mine, theirs in zip(left.log_probs, right.log_probs, strict=True):
            values = [theirs.log_prob, *theirs.top_log_probs]
            assert [mine.log_prob, *mine.top_log_probs] == pytest.approx(values, rel=0, abs=tolerance)
        assert left.cum_log_prob == pytest.approx(right.cum_log_prob, rel=0, abs=NUM_TOKENS * tolerance)
        assert len(right.generation_logits) == (NUM_TOKENS if "returns_generation_logits" in asked else 0)
        mine_logits, their_logits = (
            np.frombuffer(b"".join([*each.generation_logits, each.context_logits]), np.float32)
            for each in (left, right)
        )
        assert mine_logits.shape == their_logits.shape
        np.testing.assert_allclose(mine_logits, their_logits, rtol=0, atol=tolerance)
