from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_interpreter import Interpret
from kernels_on_cpu import kernels_on_cpu

from helpers.sequence_steps import SequenceRow, step_of
from helpers.tiny_models import make_tiny_model
from naiad.config import EngineConfig
from naiad.model_runner import ModelRunner
from naiad.model_runner.graph_buckets import Buckets
from naiad.model_runner.paged_model import PagedModel
from naiad.sequence import SamplingParams, Sequence

BLOCK = 16
# Tokens of each sequence in each step, 0 = it is not in the step: prompts, decoding in which one joins and
# one leaves, drafts of different lengths, a step of too many tokens.
STEPS = [(40, 3, 0), (1, 1, 0), (1, 1, 0), (1, 0, 2), (3, 0, 1), (1, 0, 1), (0, 5, 20)]
NUM_REPLAYED = 5


class Recorder:
    """Stands in for CUDA graphs: repeats the computation."""

    def __init__(self) -> None:
        self.num_captured = 0
        self.num_replayed = 0

    def capture(self, compute: Callable[[], None]) -> Callable[[], None]:
        self.num_captured += 1

        def replay() -> None:
            self.num_replayed += 1
            compute()

        return replay


def generate(
    directory: Path, recorder: Recorder | None
) -> tuple[list[list[int]], torch.Tensor, Recorder | None]:
    """The ids of three sequences, and the contents of the pool."""
    config = EngineConfig(
        cpu_kernels="torch",
        model_dir=str(directory),
        dtype="float32",
        block_size=BLOCK,
        max_num_batched_tokens=64,
        max_num_seqs=4,
    )
    runner = ModelRunner(config)
    with kernels_on_cpu():
        return run_steps(runner, recorder), runner._pool._tensors[0], recorder


def run_steps(runner: PagedModel, recorder: Recorder | None) -> list[list[int]]:
    """The ids of three sequences."""
    if recorder is not None:
        runner.capture_graphs(Buckets((1, 3), (1, 3), (30, 64)), recorder.capture)
    sequences = [
        Sequence(
            sequence_id=index,
            token_ids=[(7 * index + 3 * n) % 90 for n in range(length)],
            num_prompt_tokens=length,
            params=SamplingParams(max_tokens=20, temperature=0.7, seed=index),
            arrival_s=0.0,
            block_table=[9 - index, 3 + index, index],
        )
        for index, length in enumerate((40, 3, 22))
    ]
    for nums in STEPS:
        rows = [row(each, num) for each, num in zip(sequences, nums, strict=True) if num]
        output = runner.run(step_of(rows))
        assert output.errors == {}
        for each in rows:
            sequence = each.sequence
            sampled = output.sampled_token_ids.get(sequence.sequence_id, [])
            known = sequence.num_tokens - sequence.num_computed_tokens
            sequence.num_computed_tokens += min(known, each.num_scheduled_tokens)
            sequence.num_computed_tokens += max(0, len(sampled) - 1)
            sequence.token_ids += sampled
    return [each.output_token_ids for each in sequences]


def row(sequence: Sequence, num_tokens: int) -> SequenceRow:
    """A row of this many tokens: known ones, then drafts."""
    num_known = min(num_tokens, sequence.num_tokens - sequence.num_computed_tokens)
    drafts = tuple(range(num_tokens - num_known))
    samples = sequence.num_computed_tokens + num_known == sequence.num_tokens
    return SequenceRow(sequence, sequence.num_computed_tokens, num_tokens, samples, drafts)


# With one group of layers, and with two.
MODELS = [
    ("LlamaForCausalLM", {"num_hidden_layers": 1}),
    (
        "Gemma3ForCausalLM",
        {
            "num_hidden_layers": 2,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
]


@pytest.mark.parametrize(("architecture", "settings"), MODELS)
def test_replayed_steps_are_the_ones_computed_eagerly(
    interpret: Interpret, tmp_path: Path, architecture: str, settings: dict[str, Any]
) -> None:
    make_tiny_model(tmp_path, architecture, **settings)
    expected_ids, expected_pool, _ = interpret(generate, tmp_path, None)
    ids, pool, recorder = interpret(generate, tmp_path, Recorder())
    assert (recorder.num_captured, recorder.num_replayed) == (8, NUM_REPLAYED)
    assert ids == expected_ids
    assert torch.equal(pool != 0, expected_pool != 0)
    torch.testing.assert_close(pool, expected_pool, atol=1e-5, rtol=1e-4)
