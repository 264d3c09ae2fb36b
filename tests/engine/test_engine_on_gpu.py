"""The whole engine on a GPU against transformers on a CPU."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from helpers.tiny_models import ARCHITECTURES, make_tiny_model
from helpers.tiny_tokenizers import byte_level_tokenizer, write_tokenizer
from naiad.config import EngineConfig
from naiad.engine import Engine, build_engine
from naiad.outputs import RequestOutput
from naiad.sequence import EngineRequest, SamplingParams

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
NUM_TOKENS = 40
LENGTHS = (1, 2, 15, 16, 17, 33, 64, 100, 150)


def make_model(directory: Path, architecture: str) -> Any:
    tokenizer = byte_level_tokenizer()
    write_tokenizer(directory, tokenizer)
    return make_tiny_model(directory, architecture, vocab_size=tokenizer.get_vocab_size(), eos_token_id=None)


def make_engine(directory: Path, dtype: str, **settings: Any) -> Engine:
    values = {"block_size": 16, "kv_cache_bytes": 200 << 20, "max_num_batched_tokens": 96, **settings}
    return build_engine(EngineConfig(model_dir=str(directory), device=DEVICE, dtype=dtype, **values))


def generate(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> list[list[RequestOutput]]:
    outputs: list[list[RequestOutput]] = [[] for _ in prompts]
    for number, prompt in enumerate(prompts):
        engine.add_request(EngineRequest(sequence_id=number, prompt_token_ids=prompt, params=params))
    while engine.has_work:
        for output in engine.step():
            assert output.error_message == ""
            if not output.only_started:
                outputs[output.sequence_id].append(output)
    return outputs


def random_prompts(vocab_size: int) -> list[list[int]]:
    draw = random.Random(5)
    return [[draw.randrange(vocab_size) for _ in range(length)] for length in LENGTHS]


def assert_are_greedy(model: Any, prompts: list[list[int]], outputs: list[list[RequestOutput]]) -> None:
    """By induction: given the prompt and the tokens before, transformers picks each token."""
    for prompt, row in zip(prompts, outputs, strict=True):
        made = [token_id for output in row for token_id in output.token_ids]
        assert len(made) == NUM_TOKENS
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + made[:-1]])).logits[0, len(prompt) - 1 :]
        assert logits.argmax(-1).tolist() == made


def logits_of(model: Any, prompts: list[list[int]]) -> torch.Tensor:
    with torch.inference_mode():
        return torch.cat([model(torch.tensor([prompt])).logits[0].float() for prompt in prompts])


@pytest.mark.parametrize(
    "settings",
    [{}, {"cuda_graphs": False}, {"batch_invariant": True}, {"drafter": "ngram"}, {"max_num_seqs": 4}],
    ids=str,
)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_tokens_are_those_of_transformers(
    tmp_path: Path, architecture: str, settings: dict[str, Any]
) -> None:
    model = make_model(tmp_path, architecture)
    prompts = random_prompts(250)
    engine = make_engine(tmp_path, "float32", **settings)
    assert_are_greedy(model, prompts, generate(engine, prompts, SamplingParams(max_tokens=NUM_TOKENS)))
    assert engine.stats().num_used_blocks == 0


def test_the_default_models_greedy_tokens_are_those_of_transformers(default_model_dir: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(default_model_dir, dtype=torch.float32)
    prompts = random_prompts(49_000)
    engine = make_engine(default_model_dir, "float32")
    assert_are_greedy(model, prompts, generate(engine, prompts, SamplingParams(max_tokens=NUM_TOKENS)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_in_16_bits_are_as_near_as_those_of_transformers(
    tmp_path: Path, architecture: str, dtype: str
) -> None:
    model = make_model(tmp_path, architecture)
    prompts = random_prompts(250)
    asking = SamplingParams(max_tokens=1, returns_context_logits=True)
    outputs = generate(make_engine(tmp_path, dtype), prompts, asking)
    rows = [
        np.frombuffer(row[0].context_logits, "<f4").reshape(-1, model.config.vocab_size) for row in outputs
    ]
    actual = torch.from_numpy(np.concatenate(rows))
    expected = logits_of(model, prompts)
    theirs = logits_of(model.to(getattr(torch, dtype)), prompts)
    error, their_error = ((each - expected).square().mean().sqrt() for each in (actual, theirs))
    assert error <= 2 * their_error


def test_seeded_draws_are_the_same_alone_and_in_a_crowd(tmp_path: Path) -> None:
    make_model(tmp_path, "LlamaForCausalLM")
    engine = make_engine(tmp_path, "float32", enable_prefix_caching=False)
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.8, top_p=0.95, seed=3)
    prompts = random_prompts(250)

    def tokens(asked: list[list[int]]) -> list[list[int]]:
        rows = generate(engine, asked, params)
        return [[token_id for output in row for token_id in output.token_ids] for row in rows]

    assert [tokens([prompt])[0] for prompt in prompts] == tokens(prompts)
