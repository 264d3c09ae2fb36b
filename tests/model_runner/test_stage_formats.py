"""Rounded weights and KV caches in three stages.

A process has one split model at a time, so these are not in the file that keeps one open.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.quantised_cases import CASES, SIZES
from helpers.quantised_checkpoints import write_checkpoint
from helpers.runner_traffic import make_engine, traffic
from helpers.split_outputs import logits_of, token_ids
from helpers.tiny_models import make_tiny_model
from naiad.config import EngineConfig
from naiad.model_runner import ModelRunner
from naiad.model_runner.lone_steps import LoneRow, lone_step
from naiad.sequence import SamplingParams
from naiad_kernels.native.variants import best_variant

# A token whose embedding is not finite.
BAD_ID = 90
PARAMS = SamplingParams(max_tokens=4, returns_generation_logits=True)


def make_config(folder: Path, **settings: Any) -> EngineConfig:
    return EngineConfig(
        model_dir=str(folder),
        drafter="ngram",
        max_num_batched_tokens=48,
        max_num_seqs=6,
        block_size=16,
        start_cache=False,
        **settings,
    )


@contextmanager
def in_stages(config: EngineConfig) -> Iterator[ModelRunner]:
    runner = ModelRunner(replace(config, pipeline_parallel_size=3))
    try:
        yield runner
    finally:
        runner.close()


@pytest.mark.skipif(best_variant() is None, reason="this CPU has no AVX2")
@pytest.mark.parametrize(
    ("settings", "vector_bytes"),
    [
        ({"quantization": "int8", "dtype": "float32", "kv_cache_dtype": "int8"}, 10 + 4),
        ({"quantization": "int4", "dtype": "bfloat16"}, 20),
    ],
    ids=["int8", "int4"],
)
def test_native_stages_have_the_bits_of_one_process(
    tmp_path: Path, settings: dict[str, str], vector_bytes: int
) -> None:
    """In random traffic: rows are computed alone, so neither pieces nor stages change a bit."""
    make_tiny_model(tmp_path, num_attention_heads=9, num_key_value_heads=3)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.embed_tokens.weight"][BAD_ID] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    # 14 blocks of 16 tokens: keys and values of three heads in three layers.
    num_bytes = 14 * 16 * 2 * 3 * 3 * vector_bytes
    config = make_config(tmp_path, cpu_kernels="native", kv_cache_bytes=num_bytes, **settings)
    here, totals = ModelRunner(config), Counter[str]()
    with in_stages(config) as there:
        assert there.kv_groups == here.kv_groups
        for seed in range(2):
            engine = make_engine(config, here, overlaps=False)
            expected = traffic(engine, seed)
            made = traffic(make_engine(config, there, overlaps=False), seed)
            assert made.keys() == expected.keys()
            for sequence_id, outputs in made.items():
                assert token_ids(outputs) == token_ids(expected[sequence_id])
                assert torch.equal(logits_of(outputs), logits_of(expected[sequence_id]))
            stats = engine.stats()
            totals += Counter(preempted=stats.total_preemptions, drafted=stats.total_draft_tokens)
        check_bad_draft(here, there)
    assert totals["preempted"] > 0
    assert totals["drafted"] > 0


def check_bad_draft(*runners: ModelRunner) -> None:
    """A row is computed again without a draft that is not finite, and what that leaves is cleared."""
    bad = [
        LoneRow(1, [1, 2, 3], 0, [0], PARAMS, draft_token_ids=(4, BAD_ID)),
        LoneRow(2, [5, BAD_ID], 0, [1], PARAMS),
    ]
    next_row = LoneRow(1, [1, 2, 3, 4], 3, [0], PARAMS)
    made = []
    for runner in runners:
        output = runner.launch(lone_step(bad))()
        assert output.sampled_token_ids.keys() == {1}
        assert output.errors.keys() == {2}
        runner.clear_blocks([[1]])
        again = runner.launch(lone_step([next_row]))()
        assert again.errors == {}
        made.append((output.sampled_token_ids, again.sampled_token_ids, again.generation_logits))
    assert made[0] == made[1]


def logits_of_prompts(runner: ModelRunner) -> torch.Tensor:
    """The logits after each of 16 prompts, which are computed in two pieces, and of a token after each."""
    logits = []
    for number in range(16):
        token_ids = [(7 * number + place * (number + 1)) % 90 for place in range(41)]
        for known, start in ((token_ids[:40], 0), (token_ids, 40)):
            output = runner.launch(lone_step([LoneRow(1, known, start, [0, 1, 2], PARAMS)]))()
            logits.append(output.generation_logits[1][0])
    return torch.frombuffer(bytearray(b"".join(logits)), dtype=torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["gptq by activation", "packed asymmetric"])
def test_quantised_checkpoints_and_caches_in_eight_bits_are_as_in_one_process(
    tmp_path: Path, case: str
) -> None:
    """The last bits of torch's products depend on the number of tokens, which may move a code by one."""
    writer, form = CASES[case]
    make_tiny_model(tmp_path / "plain", **{**SIZES, "num_hidden_layers": 3})
    path = tmp_path / "quantised"
    write_checkpoint(tmp_path / "plain", path, lambda name: None if name == "lm_head" else writer, form)
    exact = make_config(path, dtype="float32", cpu_kernels="torch", kv_cache_bytes=1 << 20)
    rounded = replace(exact, kv_cache_dtype="int8")
    expected, alone = (logits_of_prompts(ModelRunner(each)) for each in (exact, rounded))
    with in_stages(exact) as runner:
        torch.testing.assert_close(logits_of_prompts(runner), expected, rtol=0, atol=1e-4)
    with in_stages(rounded) as runner:
        made = logits_of_prompts(runner)
    assert (made - alone).norm() <= 0.1 * (alone - expected).norm()
