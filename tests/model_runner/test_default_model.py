from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.nn.utils.rnn import pad_sequence

from helpers.sequence_steps import SequenceRow, step_of
from naiad.cli.quantize.command import TEXT
from naiad.cli.quantize.quality import BLOCK_SIZE, Quality, logits_of_text
from naiad.config import EngineConfig
from naiad.model_runner import ModelRunner
from naiad.sequence import SamplingParams, Sequence
from naiad_kernels.linear.onednn import computes_in_bfloat16
from naiad_kernels.native.variants import best_variant

NEW_TOKENS = 12
# Means over NEAR_PROMPTS of the deviations of bfloat16, as stated in docs/compatibility.md. For a single
# prompt they are random: its RMS is anywhere from 0.05 to 0.5 in every implementation.
MAX_RMS_RATIO = 1.15
MAX_KL = 0.01
# Of eight-bit weights and inputs: after each prompt, and of all tokens of a text of prose and code.
MAX_INT8_KL = 0.03
MAX_INT8_KL_OF_TEXT = 0.012
TEXT_TOKENS, TEXT_WINDOW = 2560, 512
PROMPTS = ["The capital of France is", "1, 2, 3, 4,", "def fibonacci(n):\n    ", "a" * 300]
_SUBJECTS = (
    "France",
    "water",
    "a prime number",
    "Shakespeare",
    "the moon",
    "music",
    "a neural network",
    "tea",
)
_SENTENCES = (
    "The most important thing about {} is",
    "Q: What do you know about {}?\nA:",
    "Once upon a time, {} and",
    "def describe():\n    # {}\n    return",
    "1. {}\n2.",
    "Elle m'a parlé de {} pendant",
    '{"topic": "{}", "year":',
    "{}, {}, {},",
)
NEAR_PROMPTS = [sentence.replace("{}", subject) for sentence in _SENTENCES for subject in _SUBJECTS]


@pytest.fixture(scope="module")
def prompts(default_model_dir: Path) -> list[list[int]]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(default_model_dir)
    return [tokenizer(text)["input_ids"] for text in PROMPTS]


def generate(
    runner: ModelRunner, prompts: list[list[int]], chunks: list[int], max_tokens: int = NEW_TOKENS
) -> list[list[int]]:
    """Greedy ids of each prompt, in one batch; prompt chunks have at most `chunks` tokens."""
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


def test_64_tokens_of_64_prompts_equal_transformers(
    default_model_dir: Path, float32_runner: ModelRunner
) -> None:
    """By induction: after each prefix that the engine has made, transformers picks the same token."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(default_model_dir)
    prompts = [tokenizer(text)["input_ids"] for text in NEAR_PROMPTS]
    assert len(prompts) == 64
    model = transformers.AutoModelForCausalLM.from_pretrained(default_model_dir, dtype=torch.float32)
    for first in range(0, len(prompts), 16):
        batch = prompts[first : first + 16]
        made = generate(float32_runner, batch, [16] * len(batch), max_tokens=64)
        texts = [torch.tensor(prompt + tokens) for prompt, tokens in zip(batch, made, strict=True)]
        with torch.inference_mode():
            # No token attends to later tokens, so padding does not matter.
            picked = model(pad_sequence(texts, batch_first=True)).logits.argmax(-1)
        for prompt, tokens, picks in zip(batch, made, picked, strict=True):
            assert len(tokens) == 64
            assert picks[len(prompt) - 1 : len(prompt) + 63].tolist() == tokens


def test_chunk_sizes_make_the_same_tokens(float32_runner: ModelRunner, prompts: list[list[int]]) -> None:
    prompt = [token_id for ids in prompts for token_id in ids][:70]
    assert len(prompt) == 70
    expected = generate(float32_runner, [prompt], [70])
    chunks = [1, 2, 3, 15, 16, 17, 31, 33, 47, 63, 64, 65]
    assert generate(float32_runner, [prompt] * len(chunks), chunks) == expected * len(chunks)


@dataclass(frozen=True)
class Deviation:
    """The deviation of logits from float32: means over all prompts.

    Attributes:
        rms: root mean square of the logits' differences.
        kl: Kullback-Leibler divergence of the distributions, in nats.
    """

    rms: float
    kl: float


def deviation(logits: torch.Tensor, expected: torch.Tensor) -> Deviation:
    """Compare two tensors of logits, [prompts, vocab]."""
    rms = (logits - expected).square().mean(dim=1).sqrt()
    log_probs, expected_log_probs = logits.log_softmax(1), expected.log_softmax(1)
    kl = (expected_log_probs.exp() * (expected_log_probs - log_probs)).sum(dim=1)
    return Deviation(rms.mean().item(), kl.mean().item())


def transformers_logits(model_dir: Path, prompts: list[list[int]], dtype: torch.dtype) -> torch.Tensor:
    """The logits after each prompt, [prompts, vocab] float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype)
    # No token attends to later tokens, so padding does not matter.
    padded = pad_sequence([torch.tensor(prompt) for prompt in prompts], batch_first=True)
    ends = torch.tensor([len(prompt) - 1 for prompt in prompts])
    with torch.inference_mode():
        hidden = model.model(padded).last_hidden_state[torch.arange(len(prompts)), ends]
        logits: torch.Tensor = model.lm_head(hidden).float()
    return logits


def engine_logits(
    model_dir: Path,
    prompts: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    dtype: str = "bfloat16",
    **settings: Any,
) -> torch.Tensor:
    """The engine's logits, with all prompts in one step."""
    num_tokens = sum(len(prompt) for prompt in prompts)
    runner = ModelRunner(
        EngineConfig(
            model_dir=str(model_dir),
            dtype=dtype,
            block_size=16,
            max_num_seqs=len(prompts),
            max_num_batched_tokens=num_tokens,
            kv_cache_bytes=512 << 20,
            **settings,
        )
    )
    seen: list[torch.Tensor] = []
    start = runner._sampler.start
    monkeypatch.setattr(
        runner._sampler, "start", lambda logits, *rest: seen.append(logits.clone()) or start(logits, *rest)
    )
    generate(runner, prompts, [num_tokens] * len(prompts), max_tokens=1)
    (logits,) = seen
    return logits.float()


def test_bfloat16_logits_are_near_float32s(default_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU without bfloat16 emulates it, so that transformers takes minutes there: only the KL counts."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(default_model_dir)
    prompts = [tokenizer(text)["input_ids"] for text in NEAR_PROMPTS]
    assert len(prompts) == 64
    expected = transformers_logits(default_model_dir, prompts, torch.float32)
    ours = deviation(engine_logits(default_model_dir, prompts, monkeypatch), expected)
    print(f"engine: {ours}")
    assert ours.kl <= MAX_KL
    if computes_in_bfloat16():
        theirs = deviation(transformers_logits(default_model_dir, prompts, torch.bfloat16), expected)
        print(f"transformers: {theirs}")
        assert ours.rms <= MAX_RMS_RATIO * theirs.rms


@pytest.mark.skipif(best_variant() is None, reason="this CPU has no AVX2")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_of_eight_bits_are_near_float32s(
    default_model_dir: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(default_model_dir)
    prompts = [tokenizer(text)["input_ids"] for text in NEAR_PROMPTS]
    expected = transformers_logits(default_model_dir, prompts, torch.float32)
    # Only native kernels compute it.
    settings = {"quantization": "int8", "cpu_kernels": "native"}
    ours = deviation(engine_logits(default_model_dir, prompts, monkeypatch, dtype, **settings), expected)
    print(f"engine: {ours}")
    # Rounding that did nothing would not be rounding.
    assert 1e-4 < ours.kl <= MAX_INT8_KL


@pytest.mark.skipif(best_variant() is None, reason="this CPU has no AVX2")
def test_eight_bits_change_the_distributions_of_a_text_little(default_model_dir: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(default_model_dir)
    ids = tokenizer(TEXT.read_text(encoding="utf-8"))["input_ids"][:TEXT_TOKENS]
    assert len(ids) == TEXT_TOKENS
    reference = transformers.AutoModelForCausalLM.from_pretrained(default_model_dir, dtype=torch.float32)
    runners = {
        dtype: ModelRunner(
            EngineConfig(
                model_dir=str(default_model_dir),
                dtype=dtype,
                quantization="int8",
                cpu_kernels="native",
                max_num_batched_tokens=TEXT_WINDOW,
                block_size=BLOCK_SIZE,
                kv_cache_bytes=128 << 20,
            )
        )
        for dtype in ("float32", "bfloat16")
    }
    found = {dtype: Quality() for dtype in runners}
    for start in range(0, TEXT_TOKENS, TEXT_WINDOW):
        window = ids[start : start + TEXT_WINDOW]
        with torch.inference_mode():
            expected = reference(torch.tensor([window])).logits[0, :-1]
        for dtype, runner in runners.items():
            found[dtype].add(logits_of_text(runner, window)[:-1], expected, torch.tensor(window[1:]))
    for quality in found.values():
        # Rounding that did nothing would not be rounding.
        assert 1e-4 < quality.mean_kl <= MAX_INT8_KL_OF_TEXT, found


def test_bfloat16_knows_the_capital_of_france(default_model_dir: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(default_model_dir)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    runner = ModelRunner(
        EngineConfig(model_dir=str(default_model_dir), dtype="bfloat16", max_num_batched_tokens=256)
    )
    (ids,) = generate(runner, [prompt], [512], max_tokens=10)
    assert "Paris" in tokenizer.decode(ids)
