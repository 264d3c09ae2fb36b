from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from helpers.sequence_steps import SequenceRow, step_of
from naiad.config import EngineConfig
from naiad.model_runner import ModelRunner
from naiad.sequence import SamplingParams, Sequence

NEW_TOKENS = 12
# Of bfloat16's logits against float32's, which deviate by 3 themselves; stated in docs/compatibility.md.
MAX_BFLOAT16_RMS = 0.5
MAX_BFLOAT16_KL = 0.01
PROMPTS = ["The capital of France is", "1, 2, 3, 4,", "def fibonacci(n):\n    ", "a" * 300]


@pytest.fixture(scope="module")
def prompts(default_model_dir: Path) -> list[list[int]]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(default_model_dir)
    return [tokenizer(text)["input_ids"] for text in PROMPTS]


def generate(
    runner: ModelRunner, prompts: list[list[int]], chunks: list[int], max_tokens: int = NEW_TOKENS
) -> list[list[int]]:
    """Greedy ids of each prompt, all at once; the prompts' pieces have at most `chunks` tokens."""
    sequences = []
    for index, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=max_tokens)
        table = list(range(index * 8, index * 8 + 8))
        sequences.append(Sequence(index, list(prompt), len(prompt), params, 0.0, block_table=table))
    while pending := [s for s in sequences if s.num_output_tokens < max_tokens]:
        rows = []
        for sequence in pending:
            start = sequence.num_computed_tokens
            count = min(chunks[sequence.sequence_id], sequence.num_tokens - start)
            rows.append(SequenceRow(sequence, start, count, start + count == sequence.num_tokens))
        output = runner.run(step_of(rows))
        for row in rows:
            row.sequence.num_computed_tokens += row.num_scheduled_tokens
            if row.samples:
                row.sequence.token_ids += output.sampled_token_ids[row.sequence_id]
    return [sequence.output_token_ids for sequence in sequences]


@pytest.fixture(scope="module")
def float32_runner(default_model_dir: Path) -> ModelRunner:
    return ModelRunner(
        EngineConfig(model_dir=str(default_model_dir), dtype="float32", max_num_batched_tokens=256)
    )


def test_float32_greedy_ids_equal_transformers(
    default_model_dir: Path, float32_runner: ModelRunner, prompts: list[list[int]]
) -> None:
    actual = generate(float32_runner, prompts, [24] * len(prompts))
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


def test_every_chunk_size_makes_the_same_tokens(
    float32_runner: ModelRunner, prompts: list[list[int]]
) -> None:
    prompt = [token_id for ids in prompts for token_id in ids][:70]
    assert len(prompt) == 70
    expected = generate(float32_runner, [prompt], [70])
    assert generate(float32_runner, [prompt] * 64, list(range(1, 65))) == expected * 64


def test_bfloat16_logits_are_near_float32s(
    default_model_dir: Path, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    load = transformers.AutoModelForCausalLM.from_pretrained
    wide, narrow = (load(default_model_dir, dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    runner = ModelRunner(
        EngineConfig(model_dir=str(default_model_dir), dtype="bfloat16", max_num_batched_tokens=256)
    )
    seen: list[torch.Tensor] = []
    compute = runner._model.logits
    monkeypatch.setattr(
        runner._model, "logits", lambda hidden: seen.append(compute(hidden)) or seen[-1].clone()
    )
    for prompt in prompts:
        generate(runner, [prompt], [512], max_tokens=1)
        with torch.inference_mode():
            expected, theirs = (
                model(torch.tensor([prompt])).logits[0, -1].float() for model in (wide, narrow)
            )
        ours = seen.pop()[0]
        their_rms = (theirs - expected).square().mean().sqrt().item()
        assert (ours - expected).square().mean().sqrt().item() < min(MAX_BFLOAT16_RMS, 2 * their_rms)
        kl = torch.nn.functional.kl_div(
            ours.log_softmax(0), expected.log_softmax(0), log_target=True, reduction="sum"
        )
        assert kl.item() < MAX_BFLOAT16_KL


def test_bfloat16_knows_the_capital_of_france(default_model_dir: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(default_model_dir)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    runner = ModelRunner(
        EngineConfig(model_dir=str(default_model_dir), dtype="bfloat16", max_num_batched_tokens=256)
    )
    (ids,) = generate(runner, [prompt], [512], max_tokens=10)
    assert "Paris" in tokenizer.decode(ids)
