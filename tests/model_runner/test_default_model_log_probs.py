from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
import torch
import transformers

from helpers.sequence_steps import SequenceRow, step_of
from naiad.config import EngineConfig
from naiad.model_runner import ModelRunner
from naiad.outputs import TokenLogProbs
from naiad.sequence import SamplingParams, Sequence

MAX_DEVIATION = 1e-3
TEXTS = [
    "The capital of France is",
    "1, 2, 3, 4,",
    "def fibonacci(n):\n    ",
    "Dear Sir or Madam,",
    "Once upon a time, in a land",
]


def make_sequences(prompts: list[list[int]], max_tokens: int) -> list[Sequence]:
    """Make sequences, half greedy, half drawn with processors; log-probabilities are raw in both cases."""
    sequences = []
    for index, prompt in enumerate(prompts):
        drawn = {"temperature": 1.1, "min_p": 0.05, "repetition_penalty": 1.2} if index % 2 else {}
        params = SamplingParams(
            max_tokens=max_tokens, seed=index, num_log_probs=20, stop_token_ids=(2,), min_tokens=3, **drawn
        )
        table = list(range(index * 16, index * 16 + 16))
        sequences.append(Sequence(index, list(prompt), len(prompt), params, 0.0, block_table=table))
    return sequences


def generate(runner: ModelRunner, sequences: list[Sequence]) -> dict[int, list[TokenLogProbs]]:
    found: dict[int, list[TokenLogProbs]] = {sequence.sequence_id: [] for sequence in sequences}
    while sequences[0].num_output_tokens < sequences[0].params.max_tokens:
        rows = []
        for sequence in sequences:
            start = sequence.num_computed_tokens
            rows.append(SequenceRow(sequence, start, sequence.num_tokens - start, samples=True))
        output = runner.run(step_of(rows))
        for sequence in sequences:
            sequence.num_computed_tokens = sequence.num_tokens
            sequence.token_ids += output.sampled_token_ids[sequence.sequence_id]
            found[sequence.sequence_id] += output.log_probs[sequence.sequence_id]
    return found


@pytest.mark.parametrize(
    ("num_prompts", "max_tokens"), [(5, 20), pytest.param(10, 100, marks=pytest.mark.slow)]
)
def test_float32_log_probs_equal_transformers(
    default_model_dir: Path, num_prompts: int, max_tokens: int
) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(default_model_dir)
    chance = random.Random(0)
    prompts = [tokenizer(text)["input_ids"] for text in TEXTS]
    prompts += [[chance.randrange(49_000) for _ in range(40)] for _ in range(num_prompts - len(prompts))]
    sequences = make_sequences(prompts, max_tokens)
    config = EngineConfig(model_dir=str(default_model_dir), dtype="float32", max_num_batched_tokens=512)
    found = generate(ModelRunner(config), sequences)
    model = transformers.AutoModelForCausalLM.from_pretrained(default_model_dir, dtype=torch.float32)
    worst = 0.0
    for sequence in sequences:
        with torch.inference_mode():
            logits = model(torch.tensor([sequence.token_ids[:-1]])).logits[0]
        expected = logits[sequence.num_prompt_tokens - 1 :].log_softmax(1)
        for log_probs, row, token_id in zip(
            found[sequence.sequence_id], expected, sequence.output_token_ids, strict=True
        ):
            deviations = [abs(log_probs.log_prob - float(row[token_id]))]
            theirs = row[log_probs.top_token_ids]
            deviations += (torch.tensor(log_probs.top_log_probs) - theirs).abs().tolist()
            # The same top tokens, except for near-ties.
            deviations += (theirs - row.topk(20).values).abs().tolist()
            worst = max(worst, *deviations)
            assert math.isfinite(log_probs.log_prob)
    assert sum(len(each) for each in found.values()) == num_prompts * max_tokens
    assert worst < MAX_DEVIATION
