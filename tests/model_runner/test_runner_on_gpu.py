from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.sequence_steps import SequenceRow, step_of
from helpers.tiny_models import make_tiny_model
from naiad.config import EngineConfig
from naiad.model_runner import ModelRunner
from naiad.model_runner.rehearsal import largest_steps
from naiad.outputs import StepBatch
from naiad.sequence import SamplingParams, Sequence

pytestmark = pytest.mark.gpu

BLOCK = 16


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": 96, "head_dim": 16, "num_attention_heads": 6, "num_key_value_heads": 2}
    # Contexts are long enough to be split.
    make_tiny_model(path, max_position_embeddings=2048, **sizes)
    return path


def make_runner(directory: Path, **settings: Any) -> ModelRunner:
    values = {
        "device": "cuda",
        "dtype": "float32",
        "block_size": BLOCK,
        "kv_cache_bytes": 1 << 26,
        **settings,
    }
    return ModelRunner(EngineConfig(model_dir=str(directory), **values))


def random_step(chance: random.Random, runner: ModelRunner) -> StepBatch:
    """Random sequences, the first perhaps long, with or without drafts, drawn or greedy, in own blocks."""
    free = list(range(min(400, runner.num_blocks)))
    has_prompts = chance.random() < 0.5
    rows = []
    for index in range(chance.randint(1, 12)):
        num_drafts = chance.choice([0, 0, 3, 8])
        length = chance.randint(1, 200 if index else 1500)
        num_scheduled = chance.choice([1, length]) if has_prompts else 1
        sequence = Sequence(
            sequence_id=index,
            token_ids=[chance.randrange(90) for _ in range(length)],
            num_prompt_tokens=length,
            params=SamplingParams(
                max_tokens=1,
                temperature=chance.choice([0.0, 0.7]),
                top_p=chance.choice([1.0, 0.9]),
                top_k=chance.choice([0, 5]),
                repetition_penalty=chance.choice([1.0, 1.2]),
                returns_generation_logits=True,
            ),
            arrival_s=0.0,
            block_table=[free.pop() for _ in range(-(-(length + num_drafts) // BLOCK))],
        )
        drafts = tuple(chance.randrange(90) for _ in range(num_drafts))
        start = length - num_scheduled
        rows.append(SequenceRow(sequence, start, num_scheduled + num_drafts, True, drafts))
    return step_of(rows)


def first_logits(runner: ModelRunner, num_steps: int) -> np.ndarray:
    """The logits of the first new token of each row, for random steps."""
    chance = random.Random(0)
    found = []
    for _ in range(num_steps):
        output = runner.run(random_step(chance, runner))
        assert output.errors == {}
        found += [np.frombuffer(parts[0], "<f4") for _, parts in sorted(output.generation_logits.items())]
    return np.stack(found)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"cuda_graphs": False},
        {"batch_invariant": True},
        *({"quantization": kind} for kind in ("int8", "int4", "fp8")),
    ],
    ids=str,
)
def test_no_step_after_the_start_compiles_anything(
    directory: Path, dtype: str, settings: dict[str, Any]
) -> None:
    runner = make_runner(directory, dtype=dtype, drafter="ngram", **settings)
    runner.end_start()
    first_logits(runner, 50)
    assert runner.num_late_compiles == 0


@pytest.mark.parametrize("settings", [{"cuda_graphs": False}, {}, {"batch_invariant": True}], ids=str)
def test_logits_are_the_cpus(directory: Path, settings: dict[str, Any]) -> None:
    expected = first_logits(make_runner(directory, device="cpu"), 20)
    actual = first_logits(make_runner(directory, drafter="ngram", **settings), 20)
    np.testing.assert_allclose(actual, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_replayed_steps_draw_what_eager_ones_do(directory: Path, dtype: str) -> None:
    results = []
    for cuda_graphs in (True, False):
        runner = make_runner(directory, dtype=dtype, drafter="ngram", cuda_graphs=cuda_graphs)
        chance = random.Random(1)
        results.append([runner.run(random_step(chance, runner)).sampled_token_ids for _ in range(40)])
    agreed = [eager == replayed for eager, replayed in zip(*results, strict=True)]
    # Products with other tiles may resolve near-ties differently.
    assert sum(agreed) >= 38


def test_the_cache_fills_the_share_that_is_asked_for(directory: Path) -> None:
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    wanted_bytes = total_bytes - free_bytes + (600 << 20)
    runner = make_runner(
        directory, kv_cache_bytes=0, kv_cache_memory_fraction=wanted_bytes / total_bytes, max_num_seqs=4096
    )
    pool_bytes = runner._pool._tensors[0].nbytes
    assert 100 << 20 < pool_bytes < 600 << 20
    config = EngineConfig(model_dir=str(directory), block_size=BLOCK, max_num_seqs=4096)
    for step in largest_steps(config, 4096, runner.max_model_len):
        runner.run(step)
    free_bytes, _ = torch.cuda.mem_get_info()
    # One block, plus the rounding of allocations.
    assert total_bytes - free_bytes <= wanted_bytes + (32 << 20)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_text_alone_has_the_logits_it_has_in_a_batch(directory: Path, dtype: str) -> None:
    alone = text_logits(make_runner(directory, dtype=dtype, batch_invariant=True), [50, 1, 1, 1], 0)
    among = text_logits(make_runner(directory, dtype=dtype, batch_invariant=True), [30, 3, 17, 1, 1, 1], 9)
    assert alone == among


def text_logits(runner: ModelRunner, nums_tokens: list[int], num_others: int) -> list[bytes]:
    """A text's logits at each new token, computed in steps of these sizes beside other prompts."""
    params = SamplingParams(max_tokens=20, returns_generation_logits=True)
    text = Sequence(99, [7 * n % 90 for n in range(50)], 50, params, 0.0, block_table=[390, 12, 391, 1])
    found = []
    for num_tokens in nums_tokens:
        rows = [
            SequenceRow(
                text,
                text.num_computed_tokens,
                num_tokens,
                text.num_computed_tokens + num_tokens == text.num_tokens,
            )
        ]
        for index in range(num_others):
            other = Sequence(
                index,
                [index] * (3 + 20 * index),
                3,
                params,
                0.0,
                block_table=[*range(20 + 14 * index, 34 + 14 * index)],
            )
            rows.insert(index // 2, SequenceRow(other, 0, other.num_tokens, True))
        output = runner.run(step_of(rows))
        text.num_computed_tokens += num_tokens
        text.token_ids += output.sampled_token_ids.get(99, [])
        found += output.generation_logits.get(99, [])
    return found
