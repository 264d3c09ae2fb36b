"""The stages of a model, one after another, compute what the whole model computes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.gguf_files import write_gguf
from helpers.quantised_cases import CASES, SIZES
from helpers.quantised_checkpoints import write_checkpoint
from helpers.tiny_models import ARCHITECTURES, make_tiny_model
from naiad.config import EngineConfig, ModelConfig
from naiad.errors import ConfigError, ModelError
from naiad.model_runner.kv_pool import KVPool, cache_layout
from naiad.model_runner.lone_steps import LoneRow, lone_step
from naiad.model_runner.sequence_states import SequenceStates
from naiad.model_runner.step_inputs import build_step_inputs
from naiad.models import FamilyModel, ForwardBatch, load_model
from naiad.models.registry import load_part
from naiad.models.split.part import Part, check_can_split
from naiad.models.split.place import Place
from naiad.models.split.rank_group import RankGroup
from naiad.models.split.stage import Stage
from naiad.sampling.sampler import Sampler
from naiad.sequence import SamplingParams
from naiad_kernels.linear import LoadOptions

BLOCK = 16
CONFIG = EngineConfig(model_dir="m", block_size=BLOCK)


def load_stages(directory: Path, count: int) -> list[FamilyModel]:
    config = ModelConfig.from_directory(directory)
    # Stages of one part exchange nothing while they compute.
    nobody = cast(RankGroup, None)
    places = [Place(Stage(index, count), Part(0, 1)) for index in range(count)]
    return [load_part(str(directory), config, LoadOptions(), place, nobody) for place in places]


def logits_through(models: Sequence[FamilyModel]) -> torch.Tensor:
    """The logits after each of 50 tokens, each stage with a KV pool of its own."""
    row = LoneRow(1, [(7 * place) % 90 for place in range(50)], 0, [0, 1, 2, 3], SamplingParams(max_tokens=1))
    device, hidden, normed = torch.device("cpu"), torch.empty(0), torch.empty(0)
    for place, model in enumerate(models):
        groups = model.config.layer_groups
        layout = cache_layout(CONFIG, model.config, torch.float32, device)
        pool = KVPool(model.config, [4] * len(groups), BLOCK, torch.float32, device)
        states = SequenceStates(Sampler(97), range(len(groups))).take(lone_step([row]))
        batch, _ = build_step_inputs(states, [replace(layout, window=each.window) for each in groups])
        if place == 0:
            hidden = model.embed(batch.token_ids)
        else:
            # Later stages know no tokens.
            batch = ForwardBatch(torch.empty(0), batch.positions, batch.groups)
        normed, hidden = model.run_layers(hidden, batch, pool.layers)
    return models[0].logits(normed)


def check_stages(path: Path, count: int) -> None:
    with torch.inference_mode():
        whole = load_model(str(path), ModelConfig.from_directory(path), LoadOptions())
        expected = logits_through([whole])
        assert expected.std() > 0.1
        assert torch.equal(logits_through(load_stages(path, count)), expected)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("count", [2, 3])
def test_the_stages_of_every_architecture_give_its_logits(
    tmp_path: Path, architecture: str, count: int
) -> None:
    make_tiny_model(tmp_path, architecture)
    check_stages(tmp_path, count)


@pytest.mark.parametrize(
    "case", ["gptq by activation", "awq", "packed asymmetric", "w8a8", "fp8 blocks, ragged", "mxfp4"]
)
def test_quantised_weights_are_read_in_stages(tmp_path: Path, case: str) -> None:
    """Stages cut no matrix, so whatever is stored can be read."""
    writer, form = CASES[case]
    make_tiny_model(tmp_path / "plain", **{**SIZES, "num_hidden_layers": 3})
    path = tmp_path / "quantised"
    write_checkpoint(tmp_path / "plain", path, lambda name: None if name == "lm_head" else writer, form)
    check_stages(path, 3)


def test_a_layer_is_quantised_as_its_name_in_the_whole_model_says(tmp_path: Path) -> None:
    """The stages' layers have other numbers than in the checkpoint, and these name what is quantised."""
    writer, form = CASES["gptq"]
    make_tiny_model(tmp_path / "plain", **{**SIZES, "num_hidden_layers": 3})
    path = tmp_path / "quantised"
    is_plain = re.compile(r"lm_head|model\.layers\.0\..*")
    write_checkpoint(
        tmp_path / "plain",
        path,
        lambda name: None if is_plain.fullmatch(name) else writer,
        {**form, "dynamic": {r"-:.*\.0\..*": {}}},
    )
    check_stages(path, 3)


def test_a_gguf_file_is_read_in_stages(tmp_path: Path) -> None:
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4}
    path = tmp_path / "model.gguf"
    write_gguf(path, make_tiny_model(tmp_path, head_dim=16, **sizes), "Q8_0")
    check_stages(path, 2)


@pytest.mark.parametrize("num_layers", [1, 2, 7, 32])
def test_stages_lie_one_after_the_other_and_the_first_have_fewer_layers(num_layers: int) -> None:
    for count in range(1, num_layers + 1):
        stages = [Stage(index, count).layers(num_layers) for index in range(count)]
        assert [each for stage in stages for each in stage] == list(range(num_layers))
        sizes = [len(stage) for stage in stages]
        assert sizes == sorted(sizes)
        assert sizes[0] >= 1
        assert sizes[-1] - sizes[0] <= 1


def test_stages_have_the_groups_of_the_whole_model(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, "Gemma3ForCausalLM")
    config = ModelConfig.from_directory(tmp_path)
    stages = [Stage(index, 2).config(config) for index in range(2)]
    assert [group.window for group in config.layer_groups] == [0, 21]
    for stage in stages:
        assert [group.window for group in stage.layer_groups] == [0, 21]
    assert [[len(group.layers) for group in stage.layer_groups] for stage in stages] == [[0, 3], [1, 3]]
    assert stages[1].attention[:4] == config.attention[3:]
    assert Stage(0, 2).largest_share(config) == 1
    assert Stage(0, 1).largest_share(config) == 1


def test_the_ranks_of_a_stage_follow_each_other() -> None:
    config = EngineConfig(model_dir="m", tensor_parallel_size=2, pipeline_parallel_size=3)
    places = [Place.of(rank, config) for rank in range(config.num_ranks)]
    assert [place.rank for place in places] == list(range(6))
    assert [(place.stage.index, place.part.rank) for place in places] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
        (2, 0),
        (2, 1),
    ]
    assert [place.next_rank for place in places] == [2, 3, 4, 5, 0, 1]
    assert [place.previous_rank for place in places] == [4, 5, 0, 1, 2, 3]


def test_more_stages_than_layers_are_refused(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, num_hidden_layers=2)
    config = ModelConfig.from_directory(tmp_path)
    check_can_split(EngineConfig(model_dir="m", pipeline_parallel_size=2), config)
    with pytest.raises(ConfigError, match=r"^pipeline_parallel_size = 3: expected 1 … 2, the number of lay"):
        check_can_split(EngineConfig(model_dir="m", pipeline_parallel_size=3), config)


def test_a_tensor_that_no_stage_has_a_place_for_is_refused(tmp_path: Path) -> None:
    make_tiny_model(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    save_file({**stored, "model.layers.3.extra.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"the first is 'model\.layers\.3\.extra\.weight'"):
        load_stages(tmp_path, 2)
