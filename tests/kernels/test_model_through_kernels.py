from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from kernel_interpreter import Interpret
from kernels_on_cpu import kernels_on_cpu

from helpers.quantised_cases import CASES, SIZES
from helpers.quantised_checkpoints import write_checkpoint
from helpers.sequence_steps import SequenceRow, step_of
from helpers.tiny_models import make_tiny_model
from naiad.config import EngineConfig
from naiad.model_runner import ModelRunner, model_runner
from naiad.sequence import SamplingParams, Sequence
from naiad_kernels.linear import LoadOptions

BLOCK = 16
LENGTHS = [1, 7, 20]


def generate(
    directory: Path, through_kernels: bool, kv_cache_dtype: str = "auto"
) -> tuple[list[list[int]], list[np.ndarray]]:
    """Compute prompts together, then three steps of a token and two drafts each; ids and their logits."""
    config = EngineConfig(
        cpu_kernels="torch",
        model_dir=str(directory),
        dtype="float32",
        kv_cache_dtype=kv_cache_dtype,
        block_size=BLOCK,
        max_num_batched_tokens=64,
        max_num_seqs=4,
    )
    runner = ModelRunner(config)
    sequences = [
        Sequence(
            sequence_id=index,
            token_ids=[(7 * index + 3 * n) % 90 for n in range(length)],
            num_prompt_tokens=length,
            params=SamplingParams(
                max_tokens=20, temperature=0.7, top_p=0.8 + index / 10, returns_generation_logits=True
            ),
            arrival_s=0.0,
            block_table=[9 - index, 3 + index, index],
        )
        for index, length in enumerate(LENGTHS)
    ]
    logits = []
    with kernels_on_cpu() if through_kernels else nullcontext():
        for drafts in ((), (4,), (5, 6)):
            rows = [
                SequenceRow(
                    each,
                    each.num_computed_tokens,
                    each.num_tokens - each.num_computed_tokens + len(drafts),
                    True,
                    drafts,
                )
                for each in sequences
            ]
            output = runner.run(step_of(rows))
            assert output.errors == {}
            for each in sequences:
                each.num_computed_tokens = each.num_tokens
                each.token_ids += output.sampled_token_ids[each.sequence_id]
                logits += [np.frombuffer(part, "<f4") for part in output.generation_logits[each.sequence_id]]
    return [each.output_token_ids for each in sequences], logits


GEMMA = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("LlamaForCausalLM", {}),
        ("Qwen3ForCausalLM", {}),
        ("Gemma2ForCausalLM", GEMMA),
        ("Gemma3ForCausalLM", GEMMA),
    ],
)
def test_a_gpus_way_through_the_model_is_the_cpus(
    interpret: Interpret, tmp_path: Path, architecture: str, settings: dict[str, Any]
) -> None:
    make_tiny_model(tmp_path, architecture, num_hidden_layers=2, **settings)
    expected_ids, expected_logits = generate(tmp_path, False)
    ids, logits = interpret(generate, tmp_path, True)
    assert ids == expected_ids
    np.testing.assert_allclose(np.stack(logits), np.stack(expected_logits), atol=2e-4, rtol=0)


def test_a_gpus_way_over_a_kv_cache_in_eight_bits_is_the_cpus(interpret: Interpret, tmp_path: Path) -> None:
    make_tiny_model(tmp_path, "LlamaForCausalLM", num_hidden_layers=2)
    expected_ids, expected_logits = generate(tmp_path, False, "int8")
    ids, logits = interpret(generate, tmp_path, True, "int8")
    assert ids == expected_ids
    np.testing.assert_allclose(np.stack(logits), np.stack(expected_logits), atol=2e-4, rtol=0)
    _, unrounded = generate(tmp_path, False)
    assert np.abs(np.stack(unrounded) - np.stack(expected_logits)).max() > 2e-3


def generate_packed(
    directory: Path, through_kernels: bool, quantization: str = "none"
) -> tuple[list[list[int]], list[np.ndarray]]:
    def packing(*settings: Any, **more: Any) -> LoadOptions:
        return LoadOptions(*settings[:-1], quantization, **{**more, "packed": True})

    with mock.patch.object(model_runner, "LoadOptions", packing):
        return generate(directory, through_kernels)


@pytest.mark.parametrize(
    "case", ["packed old zero points", "w8a8", "mxfp4", "gptq by activation, groups of 32"]
)
def test_a_gpus_way_through_packed_layers_is_the_cpus(
    interpret: Interpret, tmp_path: Path, case: str
) -> None:
    make_tiny_model(tmp_path / "plain", **SIZES)
    writer, config = CASES[case]
    directory = tmp_path / "quantised"
    write_checkpoint(
        tmp_path / "plain", directory, lambda layer: None if layer == "lm_head" else writer, config
    )
    check_packed_layers(interpret, directory, "none", rounds_inputs=case == "w8a8")


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_gpus_way_through_rounded_layers_is_the_cpus(
    interpret: Interpret, tmp_path: Path, quantization: str
) -> None:
    """Not so with FP8, where the interpreter rounds inputs wrongly (`test_quant_kernels.py`)."""
    make_tiny_model(tmp_path, **SIZES)
    check_packed_layers(interpret, tmp_path, quantization, rounds_inputs=False)


def check_packed_layers(
    interpret: Interpret, directory: Path, quantization: str, *, rounds_inputs: bool
) -> None:
    expected_ids, expected_logits = generate_packed(directory, False, quantization)
    ids, logits = interpret(generate_packed, directory, True, quantization)
    assert ids == expected_ids
    # An input that lies between two numbers of eight bits may be rounded to either.
    atol = 0.1 if rounds_inputs else 2e-4
    np.testing.assert_allclose(np.stack(logits), np.stack(expected_logits), atol=atol, rtol=0)
