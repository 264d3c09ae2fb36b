from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from naiad.config import EngineConfig
from naiad.model_runner import ModelRunner
from naiad.outputs import ScheduledSequence, SchedulerOutput
from naiad.sequence import SamplingParams, Sequence

NEW_TOKENS = 12
PROMPTS = ["The capital of France is", "1, 2, 3, 4,", "def fibonacci(n):\n    ", "a" * 300]


@pytest.fixture(scope="module")
def prompts(default_model_dir: Path) -> list[list[int]]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(default_model_dir)
    return [tokenizer(text)["input_ids"] for text in PROMPTS]


def generate(runner: ModelRunner, prompts: list[list[int]], chunk: int) -> list[list[int]]:
    sequences = []
    for index, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=NEW_TOKENS)
        table = list(range(index * 8, index * 8 + 8))
        sequences.append(Sequence(index, list(prompt), len(prompt), params, 0.0, block_table=table))
    while pending := [s for s in sequences if s.num_output_tokens < NEW_TOKENS]:
        rows = []
        for sequence in pending:
            start = sequence.num_computed_tokens
            count = min(chunk, sequence.num_tokens - start)
            rows.append(ScheduledSequence(sequence, start, count, start + count == sequence.num_tokens))
        output = runner.run(SchedulerOutput(rows))
        for row in rows:
            row.sequence.num_computed_tokens += row.num_scheduled_tokens
            if row.samples:
                row.sequence.token_ids.append(output.sampled_token_ids[row.sequence.sequence_id])
    return [sequence.output_token_ids for sequence in sequences]


def test_float32_greedy_ids_equal_transformers(default_model_dir: Path, prompts: list[list[int]]) -> None:
    config = EngineConfig(model_dir=str(default_model_dir), dtype="float32", max_num_batched_tokens=256)
    actual = generate(ModelRunner(config), prompts, chunk=24)
    model = transformers.AutoModelForCausalLM.from_pretrained(default_model_dir, dtype=torch.float32)
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        expected.append(output[0, len(prompt) :].tolist())
    assert actual == expected
