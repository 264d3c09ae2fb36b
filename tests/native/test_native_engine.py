"""A request's tokens and log-probabilities have the same bits, whatever else the engine computes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from helpers.drafting_engines import engine_parts
from helpers.tiny_models import make_tiny_model
from naiad.models.native_model import NativeModel
from naiad.outputs import TokenLogProbs
from naiad.sequence import EngineRequest, SamplingParams

Details = dict[int, tuple[list[int], list[TokenLogProbs]]]
NUM_TOKENS = 24
# The last one repeats itself, so that it gets drafts.
PROMPTS = [[7, 3], list(range(20, 60)), [9, *range(70, 10, -1)], [5, 6, 7, 8, 9] * 5]
# Each of the prompts alone needs at most six of these blocks.
NUM_BLOCKS = 8


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    # In 16 bits, as most are: with AMX, float32 multiplies such weights by tiles, and other ones by vectors.
    make_tiny_model(folder).bfloat16().save_pretrained(folder)
    return folder


def answers(model_dir: Path, numbers: range, **settings: Any) -> tuple[Details, int, int]:
    """The answers to these prompts, and how often a sequence was preempted and a draft token accepted."""
    engine, runner = engine_parts(model_dir, is_cached=False, **settings)
    assert isinstance(runner._model, NativeModel)
    for number in numbers:
        params = SamplingParams(max_tokens=NUM_TOKENS, num_log_probs=3, seed=number, temperature=number / 2)
        request = EngineRequest(sequence_id=number, prompt_token_ids=PROMPTS[number], params=params)
        engine.add_request(request)
    made: Details = {number: ([], []) for number in numbers}
    while engine.has_work:
        for output in engine.step():
            made[output.sequence_id][0].extend(output.token_ids)
            made[output.sequence_id][1].extend(output.log_probs)
    assert all(len(tokens) == len(log_probs) == NUM_TOKENS for tokens, log_probs in made.values())
    stats = engine.stats()
    return made, stats.total_preemptions, sum(stats.total_accepted_tokens_at)


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_answers_are_those_of_each_alone(model_dir: Path, dtype: str, quantization: str) -> None:
    kind: dict[str, Any] = {"dtype": dtype, "quantization": quantization, "drafter": "none"}
    alone: Details = {}
    for number in range(len(PROMPTS)):
        alone |= answers(model_dir, range(number, number + 1), cpu_threads=1, **kind)[0]
    everybody = range(len(PROMPTS))
    for num_threads in range(1, min(3, len(os.sched_getaffinity(0))) + 1):
        assert answers(model_dir, everybody, cpu_threads=num_threads, **kind)[0] == alone
    assert answers(model_dir, everybody, budget=32, **kind)[0] == alone
    made, num_preemptions, _ = answers(model_dir, everybody, num_blocks=NUM_BLOCKS, budget=32, **kind)
    assert made == alone
    assert num_preemptions > 0
    made, _, num_accepted = answers(model_dir, everybody, **kind | {"drafter": "suffix"})
    assert made == alone
    assert num_accepted > 0


def test_other_weights_give_other_bits(model_dir: Path) -> None:
    """Or equal answers would prove nothing."""
    kinds = [{"dtype": "float32"}, {"dtype": "bfloat16"}, {"quantization": "int8"}]
    found = [answers(model_dir, range(1, 2), drafter="none", **kind)[0][1][1][0].log_prob for kind in kinds]
    assert len(set(found)) == 3
