"""Parts of a model in other widths, and the default model in parts and in stages.

A process has one split model at a time, so these are not in the file that keeps one open.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from helpers.quantised_cases import CASES, SIZES
from helpers.quantised_checkpoints import write_checkpoint
from helpers.tiny_models import make_tiny_model
from naiad.config import EngineConfig
from naiad.model_runner import ModelRunner
from naiad.model_runner.lone_steps import LoneRow, lone_step
from naiad.sequence import SamplingParams

PARAMS = SamplingParams(max_tokens=4, returns_generation_logits=True)


def logits_of_prompts(runner: ModelRunner) -> torch.Tensor:
    """The logits after each of 32 prompts, one after another; those of one prompt alone differ by chance."""
    logits = []
    for number in range(32):
        row = LoneRow(
            1, [(7 * number + place * (number + 1)) % 90 for place in range(40)], 0, [0, 1, 2], PARAMS
        )
        logits.append(runner.launch(lone_step([row]))().generation_logits[1][0])
    return torch.frombuffer(bytearray(b"".join(logits)), dtype=torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"kv_cache_dtype": "int8"}, {"dtype": "bfloat16"}], ids=str)
def test_eight_and_sixteen_bits_stay_as_close_as_in_one_process(
    tmp_path: Path, settings: dict[str, str]
) -> None:
    make_tiny_model(tmp_path, num_attention_heads=9, num_key_value_heads=3)
    exact = EngineConfig(
        model_dir=str(tmp_path),
        dtype="float32",
        cpu_kernels="torch",
        kv_cache_bytes=1 << 20,
        start_cache=False,
    )
    config = replace(exact, **settings)
    expected, alone = (logits_of_prompts(ModelRunner(each)) for each in (exact, config))
    runner = ModelRunner(replace(config, tensor_parallel_size=2))
    try:
        made = logits_of_prompts(runner)
    finally:
        runner.close()
    # Other sums are rounded, so single logits differ; the error as a whole is as large.
    assert (made - expected).norm() <= 1.25 * (alone - expected).norm()


@pytest.mark.parametrize("case", ["gptq by activation", "float8 block"])
def test_quantised_weights_in_two_processes_give_the_logits_of_one(tmp_path: Path, case: str) -> None:
    writer, form = CASES[case]
    make_tiny_model(tmp_path / "plain", **SIZES)
    path = tmp_path / "quantised"
    write_checkpoint(tmp_path / "plain", path, lambda name: None if name == "lm_head" else writer, form)
    config = EngineConfig(
        model_dir=str(path),
        dtype="float32",
        cpu_kernels="torch",
        kv_cache_bytes=1 << 20,
        start_cache=False,
    )
    expected = logits_of_prompts(ModelRunner(config))
    runner = ModelRunner(replace(config, tensor_parallel_size=2))
    try:
        made = logits_of_prompts(runner)
    finally:
        runner.close()
    torch.testing.assert_close(made, expected, rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "stages"), [(2, 1), (3, 1), (1, 3)])
def test_the_default_model_makes_the_same_tokens(default_model_dir: Path, size: int, stages: int) -> None:
    """Of its three KV heads two ranks have two and one; of its 30 layers each of three stages has ten."""
    config = EngineConfig(
        model_dir=str(default_model_dir),
        dtype="float32",
        cpu_kernels="torch",
        max_num_batched_tokens=64,
        kv_cache_bytes=1 << 26,
        start_cache=False,
    )

    def generate(runner: ModelRunner) -> tuple[list[int], torch.Tensor]:
        known, logits = list(range(100, 130)), []
        for start in (0, *range(30, 50)):
            row = LoneRow(1, list(known), start, [0], PARAMS)
            output = runner.launch(lone_step([row]))()
            known += output.sampled_token_ids[1]
            logits.append(output.generation_logits[1][0])
        return known, torch.frombuffer(bytearray(b"".join(logits)), dtype=torch.float32)

    expected_ids, expected = generate(ModelRunner(config))
    runner = ModelRunner(replace(config, tensor_parallel_size=size, pipeline_parallel_size=stages))
    try:
        token_ids, logits = generate(runner)
    finally:
        runner.close()
    assert token_ids == expected_ids
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
