"""Gemma's logits equal those of transformers, with narrow windows and every optional part enabled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.tiny_models import make_tiny_model
from naiad.config import EngineConfig
from naiad.model_runner import ModelRunner
from naiad.model_runner.lone_steps import LoneRow, lone_step
from naiad.sequence import SamplingParams

WINDOW = 21
ARCHITECTURES = ["Gemma2ForCausalLM", "Gemma3ForCausalLM"]


def logits_of(directory: Path, prompt: list[int], chunks: list[int], **settings: Any) -> torch.Tensor:
    """The logits `[len(prompt), vocab_size]` of a prompt that is computed in chunks of these sizes."""
    values = {"dtype": "float32", "block_size": 16, "max_num_batched_tokens": 512, **settings}
    runner = ModelRunner(EngineConfig(model_dir=str(directory), **values))
    params = SamplingParams(max_tokens=1, returns_context_logits=True)
    table = [9, 3, 11, 2, 5, 7][: -(-len(prompt) // 16) + 1]
    parts, start = [], 0
    for chunk in chunks:
        end = start + chunk
        row = LoneRow(
            0, prompt[:end], start, table, params, samples=end == len(prompt), num_prompt_tokens=len(prompt)
        )
        output = runner.run(lone_step([row]))
        assert output.errors == {}
        parts.append(torch.frombuffer(bytearray(output.context_logits[0]), dtype=torch.float32))
        start = end
    return torch.cat(parts).view(len(prompt), -1)


def transformers_logits(model: Any, prompt: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([prompt])).logits[0]


def prompt_of(length: int) -> list[int]:
    return [(17 * place * place + 5 * place) % 96 for place in range(length)]


@pytest.mark.parametrize("length", [1, WINDOW - 1, WINDOW, WINDOW + 1, 48, 80])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_equal_transformers(tmp_path: Path, architecture: str, length: int) -> None:
    model = make_tiny_model(tmp_path, architecture)
    prompt = prompt_of(length)
    expected = transformers_logits(model, prompt)
    torch.testing.assert_close(logits_of(tmp_path, prompt, [length]), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("chunk", [1, 16, 20, 33])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_chunks_change_no_logit(tmp_path: Path, architecture: str, chunk: int) -> None:
    model = make_tiny_model(tmp_path, architecture)
    prompt = prompt_of(70)
    chunks = [chunk] * (70 // chunk) + ([70 % chunk] if 70 % chunk else [])
    expected = transformers_logits(model, prompt)
    torch.testing.assert_close(logits_of(tmp_path, prompt, chunks), expected, atol=1e-4, rtol=0)


# Changes to one part each, to show that the part affects the logits.
PARTS: list[tuple[str, dict[str, Any]]] = [
    ("Gemma2ForCausalLM", {"attn_logit_softcapping": None}),
    ("Gemma2ForCausalLM", {"final_logit_softcapping": None}),
    ("Gemma2ForCausalLM", {"sliding_window": 256}),
    ("Gemma2ForCausalLM", {"query_pre_attn_scalar": 10}),
    ("Gemma2ForCausalLM", {"layer_types": ["full_attention", "sliding_attention"] * 2}),
    ("Gemma3ForCausalLM", {"final_logit_softcapping": None}),
    ("Gemma3ForCausalLM", {"sliding_window": WINDOW + 1}),
    ("Gemma3ForCausalLM", {"rope_parameters": None}),
]


@pytest.mark.parametrize(("architecture", "changes"), PARTS)
def test_every_part_shows_in_the_logits(tmp_path: Path, architecture: str, changes: dict[str, Any]) -> None:
    prompt = prompt_of(60)
    with_it = transformers_logits(make_tiny_model(tmp_path / "with", architecture), prompt)
    model = make_tiny_model(tmp_path / "without", architecture, **changes)
    expected = transformers_logits(model, prompt)
    assert (with_it - expected).abs().max() > 0.01
    torch.testing.assert_close(logits_of(tmp_path / "without", prompt, [60]), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_bfloat16_logits_are_as_near_float32s_as_transformers(tmp_path: Path, architecture: str) -> None:
    """Rounding follows transformers: norms of 1 + weight in float32, embeddings scaled by a rounded root."""
    model = make_tiny_model(tmp_path, architecture)
    prompt = prompt_of(80)
    exact = transformers_logits(model, prompt)
    theirs = transformers_logits(model.bfloat16(), prompt).float()
    ours = logits_of(tmp_path, prompt, [80], dtype="bfloat16")
    assert rms(ours - exact) <= 1.5 * rms(theirs - exact)


def rms(difference: torch.Tensor) -> float:
    return float(difference.square().mean().sqrt())
