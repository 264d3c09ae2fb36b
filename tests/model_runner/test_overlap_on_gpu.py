"""Overlapping steps on a GPU: the host never waits between two launches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.sequence_steps import SequenceRow, step_of
from helpers.tiny_models import make_tiny_model
from naiad.config import EngineConfig
from naiad.engine import Engine
from naiad.kv_cache.kv_cache_manager import KVCacheManager
from naiad.model_runner import ModelRunner
from naiad.outputs import ModelOutput, StepBatch, StepRow
from naiad.scheduler.scheduler import Scheduler
from naiad.scheduler.step_budget import SchedulerLimits
from naiad.sequence import UNKNOWN_TOKEN, EngineRequest, SamplingParams, Sequence, SequenceStatus

pytestmark = pytest.mark.gpu

BLOCK = 16
SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 1.3, "top_k": 20},
    {"temperature": 0.8, "top_p": 0.9, "logit_bias": ((3, 2.0), (4, -1.0))},
    {"temperature": 2.0, "min_p": 0.05, "min_tokens": 40, "stop_token_ids": tuple(range(20, 60))},
    {"temperature": 1.0, "allowed_token_ids": (1, 2, 3, 40, 50)},
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_tiny_model(path, hidden_size=96, head_dim=16, num_attention_heads=6, num_key_value_heads=2)
    return path


def make_runner(directory: Path, **settings: Any) -> ModelRunner:
    values = {"device": "cuda", "dtype": "float32", "block_size": BLOCK, "kv_cache_bytes": 1 << 26}
    return ModelRunner(EngineConfig(model_dir=str(directory), **(values | settings)))


@contextmanager
def no_waiting() -> Iterator[None]:
    """Make operations raise that make the host wait for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def make_sequences() -> list[Sequence]:
    return [
        Sequence(
            sequence_id=number,
            token_ids=[(7 * number + 3 * place) % 90 for place in range(5 + 9 * number)],
            num_prompt_tokens=5 + 9 * number,
            params=SamplingParams(max_tokens=100, seed=number, **each),
            arrival_s=0.0,
            block_table=list(range(10 * number, 10 * number + 10)),
            status=SequenceStatus.RUNNING,
        )
        for number, each in enumerate(SETTINGS)
    ]


def missing(sequences: list[Sequence]) -> StepBatch:
    """A step that computes all missing tokens."""
    rows = []
    for each in sequences:
        num_missing = each.num_tokens - each.num_computed_tokens
        rows.append(SequenceRow(each, each.num_computed_tokens, num_missing, samples=True))
    return step_of(rows)


def launch_two(
    runner: ModelRunner, sequences: list[Sequence]
) -> tuple[Callable[[], ModelOutput], Callable[[], ModelOutput]]:
    """Launch the prompts' step and, before its ids are known, the next one."""
    wait_first = runner.launch(missing(sequences))
    rows = [StepRow(each.sequence_id, each.num_tokens, [UNKNOWN_TOKEN], True) for each in sequences]
    return wait_first, runner.launch(StepBatch(rows=rows, is_projected=True))


@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_no_launch_waits_for_the_device(directory: Path, cuda_graphs: bool) -> None:
    runner = make_runner(directory, cuda_graphs=cuda_graphs)
    sequences = make_sequences()
    with no_waiting():
        wait_first, wait_second = launch_two(runner, sequences)
    first, second = wait_first(), wait_second()
    assert first.errors == second.errors == {}
    assert first.sampled_token_ids == runner.run(missing(sequences)).sampled_token_ids
    for each in sequences:
        each.num_computed_tokens = each.num_tokens
        each.token_ids += first.sampled_token_ids[each.sequence_id]
    assert second.sampled_token_ids == runner.run(missing(sequences)).sampled_token_ids


@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_tokens_are_those_of_steps_one_after_the_other(directory: Path, cuda_graphs: bool) -> None:
    found = []
    for overlaps in (False, True):
        # Batch-invariant, so that rows of ended sequences do not affect the results of others.
        runner = make_runner(directory, cuda_graphs=cuda_graphs, batch_invariant=True)
        kv_cache = KVCacheManager(runner.num_blocks, BLOCK)
        engine = Engine(Scheduler(kv_cache, SchedulerLimits(8, 64)), runner, overlaps=overlaps)
        tokens: dict[int, list[int]] = {}
        for number, each in enumerate([*SETTINGS, {"temperature": 1.0, "stop_token_ids": tuple(range(30))}]):
            params = SamplingParams(max_tokens=60 + number, seed=number, **each)
            prompt = [(7 * number + 3 * place) % 90 for place in range(3 + 12 * number)]
            engine.add_request(EngineRequest(sequence_id=number, prompt_token_ids=prompt, params=params))
            tokens[number] = []
        while engine.has_work:
            for output in engine.step():
                tokens[output.sequence_id] += output.token_ids
        found.append(tokens)
    assert found[0] == found[1]
