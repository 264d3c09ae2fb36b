"""A model's steps on a CPU, overlapping as on a GPU: the tokens are the same as without overlap."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.tiny_models import make_tiny_model
from naiad.config import EngineConfig
from naiad.engine import Engine
from naiad.kv_cache.kv_cache_manager import KVCacheManager
from naiad.kv_cache.prefix_cache import PrefixCache
from naiad.model_runner import ModelRunner
from naiad.models.native_model import NativeModel
from naiad.outputs import ModelOutput, RequestOutput, StepBatch
from naiad.scheduler.scheduler import Scheduler
from naiad.scheduler.step_budget import SchedulerLimits
from naiad.sequence import EngineRequest, SamplingParams

BLOCK = 16
# Keys and values of three layers of two heads of ten float32.
BLOCK_BYTES = BLOCK * 2 * 3 * 2 * 10 * 4
# Settings with which rows can be projected: their ids are not needed on the host.
PROJECTABLE: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 1.3, "top_k": 20, "stop_token_ids": (5, 6, 7, 8, 9, 10)},
    {"temperature": 0.8, "top_p": 0.9, "logit_bias": ((3, 2.0), (4, -1.0))},
    {"temperature": 2.0, "min_p": 0.05, "min_tokens": 9, "stop_token_ids": tuple(range(20, 60))},
    {"temperature": 1.0, "allowed_token_ids": (1, 2, 3, 40, 50)},
]
OTHERS: list[dict[str, Any]] = [
    {"temperature": 1.0, "repetition_penalty": 1.2, "presence_penalty": 0.5},
    {"temperature": 1.0, "bad_words": ((3,), (4, 5)), "num_log_probs": 2},
    {"temperature": 0.5, "returns_context_logits": True, "returns_generation_logits": True},
]


class CountingRunner(ModelRunner):
    """Counts the steps that are launched while another is in flight."""

    num_overlapped = 0

    def launch(self, step: StepBatch) -> Callable[[], ModelOutput]:
        self.num_overlapped += step.is_projected
        return super().launch(step)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    make_tiny_model(directory)
    return directory


def generate(
    model_dir: Path, requests: list[EngineRequest], num_blocks: int, overlaps: bool
) -> tuple[dict[int, RequestOutput], CountingRunner, int]:
    """Each sequence's outputs merged into one, the runner, and the number of preemptions."""
    config = EngineConfig(
        model_dir=str(model_dir),
        dtype="float32",
        max_num_batched_tokens=32,
        block_size=BLOCK,
        kv_cache_bytes=num_blocks * BLOCK_BYTES,
    )
    runner = CountingRunner(config)
    kv_cache = KVCacheManager(num_blocks, BLOCK, PrefixCache(BLOCK))
    engine = Engine(Scheduler(kv_cache, SchedulerLimits(8, 32)), runner, overlaps=overlaps)
    made: dict[int, RequestOutput] = {}
    for request in requests:
        engine.add_request(request)
        for output in engine.step():
            join(made, output)
    while engine.has_work:
        for output in engine.step():
            join(made, output)
    assert kv_cache.num_used_blocks == 0
    return made, runner, engine.stats().total_preemptions


def join(made: dict[int, RequestOutput], output: RequestOutput) -> None:
    whole = made.setdefault(output.sequence_id, RequestOutput(output.sequence_id, []))
    assert whole.finish_reason is None
    whole.token_ids = whole.token_ids + output.token_ids
    whole.log_probs = whole.log_probs + output.log_probs
    whole.generation_logits = whole.generation_logits + output.generation_logits
    whole.context_logits += output.context_logits
    whole.finish_reason, whole.stop_reason = output.finish_reason, output.stop_reason


def assert_same(made: RequestOutput, expected: RequestOutput, tolerance: float) -> None:
    assert (made.token_ids, made.finish_reason) == (expected.token_ids, expected.finish_reason)
    assert made.stop_reason == expected.stop_reason
    assert [each.top_token_ids for each in made.log_probs] == [
        each.top_token_ids for each in expected.log_probs
    ]
    assert [each.log_prob for each in made.log_probs] == pytest.approx(
        [each.log_prob for each in expected.log_probs], rel=0, abs=tolerance
    )
    for parts, expected_parts in (
        (made.generation_logits, expected.generation_logits),
        ([made.context_logits], [expected.context_logits]),
    ):
        np.testing.assert_allclose(
            np.frombuffer(b"".join(parts), "<f4"),
            np.frombuffer(b"".join(expected_parts), "<f4"),
            rtol=0,
            atol=tolerance,
        )


def make_requests(settings: list[dict[str, Any]]) -> list[EngineRequest]:
    return [
        EngineRequest(
            sequence_id=10 * number,
            prompt_token_ids=[(number * 7 + place) % 90 for place in range(5 + 9 * number)],
            params=SamplingParams(max_tokens=30 - number, seed=11 + number, **each),
            sibling_ids=(10 * number + 1,) if number % 3 == 1 else (),
        )
        for number, each in enumerate(settings)
    ]


@pytest.mark.parametrize("num_blocks", [64, 7])
@pytest.mark.parametrize("settings", [PROJECTABLE, [*OTHERS, *PROJECTABLE]], ids=["projectable", "mixed"])
def test_outputs_are_those_of_steps_one_after_the_other(
    model_dir: Path, settings: list[dict[str, Any]], num_blocks: int
) -> None:
    requests = make_requests(settings)
    expected, runner, _ = generate(model_dir, requests, num_blocks, overlaps=False)
    assert runner.num_overlapped == 0
    made, runner, num_preemptions = generate(model_dir, requests, num_blocks, overlaps=True)
    # Native kernels add in the same order in every batch.
    tolerance = 0.0 if isinstance(runner._model, NativeModel) else 1e-4
    for sequence_id, output in expected.items():
        assert_same(made[sequence_id], output, tolerance)
    assert runner.num_overlapped > 10
    assert (num_preemptions > 0) == (num_blocks == 7)
    reasons = {output.finish_reason for output in made.values()}
    assert len(reasons) == 2, "some stop and some are as long as they may be"
