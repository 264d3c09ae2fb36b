"""Stages that native kernels compute have the bits of the whole model, however it is rounded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch

from helpers.tiny_models import ARCHITECTURES, make_tiny_model
from naiad.config import EngineConfig, ModelConfig
from naiad.model_runner.kv_pool import KVPool, cache_layout
from naiad.model_runner.lone_steps import LoneRow, lone_step
from naiad.model_runner.sequence_states import SequenceStates
from naiad.model_runner.step_inputs import build_step_inputs
from naiad.models import ForwardBatch, load_model
from naiad.models.native_model import NativeModel
from naiad.models.native_stage import NativeStage
from naiad.models.registry import load_part
from naiad.models.split.part import Part
from naiad.models.split.place import Place
from naiad.models.split.rank_group import RankGroup
from naiad.models.split.stage import Stage
from naiad.sampling.sampler import Sampler
from naiad.sequence import SamplingParams
from naiad_kernels.linear import LoadOptions
from naiad_kernels.native.build import load
from naiad_kernels.native.library import Team
from naiad_kernels.native.variants import best_variant

pytestmark = pytest.mark.skipif(best_variant() is None, reason="this CPU has no native kernels")

BLOCK = 16
CONFIG = EngineConfig(model_dir="m", block_size=BLOCK)
CPU = torch.device("cpu")
TOKENS = [(7 * place) % 90 for place in range(50)]


@pytest.fixture(scope="module")
def team() -> Team:
    variant = best_variant()
    assert variant is not None
    return load(variant).new_team(2)


def pool_of(config: ModelConfig, options: LoadOptions, codes: torch.dtype | None) -> KVPool:
    num_blocks = [4] * len(config.layer_groups)
    return KVPool(config, num_blocks, BLOCK, options.dtype, CPU, is_native=True, codes=codes)


def batch_of(config: ModelConfig, options: LoadOptions, start: int, end: int) -> ForwardBatch:
    """A piece of one sequence."""
    row = LoneRow(1, TOKENS[:end], start, [0, 1, 2, 3], SamplingParams(max_tokens=1))
    layout = cache_layout(CONFIG, config, options.dtype, CPU, is_native=True)
    groups = config.layer_groups
    states = SequenceStates(Sampler(97), range(len(groups))).take(lone_step([row]))
    return build_step_inputs(states, [replace(layout, window=each.window) for each in groups])[0]


def logits_in_stages(
    path: Path, count: int, pieces: Sequence[int], options: LoadOptions, codes: torch.dtype | None, team: Team
) -> torch.Tensor:
    """The logits after each token, where each stage computes all pieces before the next stage begins."""
    config = ModelConfig.from_directory(path)
    # Stages of one part exchange nothing while they compute.
    nobody = cast(RankGroup, None)
    passed: list[torch.Tensor] = []
    first: NativeStage | None = None
    for index in range(count):
        stage = Stage(index, count)
        part = load_part(str(path), config, options, Place(stage, Part(0, 1)), nobody)
        pool = pool_of(part.config, options, codes)
        native = NativeStage(part, stage, pool.layers, options.dtype, team)
        first = first or native
        made = []
        for number, (start, end) in enumerate(zip((0, *pieces), (*pieces, len(TOKENS)), strict=True)):
            given = passed[number] if passed else None
            made.append(native.run(given, batch_of(part.config, options, start, end), pool.layers))
        passed = made
    assert first is not None
    return first.logits(torch.cat(passed)).clone()


def whole_logits(path: Path, options: LoadOptions, codes: torch.dtype | None, team: Team) -> torch.Tensor:
    config = ModelConfig.from_directory(path)
    pool = pool_of(config, options, codes)
    model = NativeModel(load_model(str(path), config, options), pool.layers, options.dtype, team)
    hidden = model.forward(batch_of(config, options, 0, len(TOKENS)), pool.layers)
    return model.logits(hidden).clone()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_the_stages_of_every_architecture_give_its_bits(
    tmp_path: Path, architecture: str, quantization: str, team: Team
) -> None:
    make_tiny_model(tmp_path, architecture)
    options = LoadOptions(native=True, quantization=quantization)
    with torch.inference_mode():
        expected = whole_logits(tmp_path, options, None, team)
        assert expected.std() > 0.1
        assert torch.equal(logits_in_stages(tmp_path, 3, (20, 33), options, None, team), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("codes", [None, torch.int8], ids=str)
@pytest.mark.parametrize("count", [2, 3])
def test_stages_have_the_bits_of_one_process_in_every_width(
    tmp_path: Path, dtype: torch.dtype, codes: torch.dtype | None, count: int, team: Team
) -> None:
    make_tiny_model(tmp_path, "Gemma3ForCausalLM")
    options = LoadOptions(dtype, native=True)
    with torch.inference_mode():
        expected = whole_logits(tmp_path, options, codes, team)
        assert torch.equal(logits_in_stages(tmp_path, count, (20, 33), options, codes, team), expected)
