"""The parts of a split model together compute what the whole model computes; each reads only its part."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.gguf_files import write_gguf
from helpers.quantised_cases import CASES, SIZES
from helpers.quantised_checkpoints import write_checkpoint
from helpers.thread_ranks import ThreadGroup
from helpers.tiny_models import ARCHITECTURES, make_tiny_model
from naiad.config import EngineConfig, ModelConfig
from naiad.config.quantised.layers import BlocksOfFile
from naiad.errors import ConfigError, ModelError
from naiad.model_runner.kv_pool import KVPool, cache_layout
from naiad.model_runner.lone_steps import LoneRow, lone_step
from naiad.model_runner.sequence_states import SequenceStates
from naiad.model_runner.step_inputs import build_step_inputs
from naiad.models import DecoderModel, load_model
from naiad.models.quantised import kept_for_gpu, kept_nibbles
from naiad.models.registry import load_part
from naiad.models.safetensors_files import SafetensorsFiles
from naiad.models.sources import SafetensorsSource
from naiad.models.split.part import Part, check_can_split, part_configs
from naiad.models.split.place import Place
from naiad.models.split.rows import RowsPart
from naiad.models.split.source import SplitSource
from naiad.models.split.stage import Stage
from naiad.sampling.sampler import Sampler
from naiad.sequence import SamplingParams
from naiad_kernels.linear import LoadOptions
from naiad_kernels.native.nibbles import NibbleWeight

PROMPTS = [[1, 2, 3, 40, 96, 7, 8], [50] * 30, [0]]
BLOCK = 16


def logits_of(model: DecoderModel, joined: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """The logits after every token of `PROMPTS`, the last of which is computed in a step of its own."""
    config = EngineConfig(model_dir="m", block_size=BLOCK)
    device, groups = torch.device("cpu"), len(model.config.layer_groups)
    layout = cache_layout(config, model.config, torch.float32, device)
    pool = KVPool(model.config, [8] * groups, BLOCK, torch.float32, device)
    results = []
    for is_last in (False, True):
        params = SamplingParams(max_tokens=1)
        rows = [
            LoneRow(place, ids if is_last else ids[:-1], len(ids) - 1 if is_last else 0, tables, params)
            for place, (ids, tables) in enumerate(zip(PROMPTS, ([0], [1, 2], [3]), strict=True))
            if is_last or len(ids) > 1
        ]
        states = SequenceStates(Sampler(97), range(groups)).take(lone_step(rows))
        layouts = [replace(layout, window=each.window) for each in model.config.layer_groups]
        batch, _ = build_step_inputs(states, layouts)
        results.append(joined(model.logits(model.forward(batch, pool.layers))))
    return torch.cat(results)


def split_logits(directory: Path, size: int) -> list[torch.Tensor]:
    """The logits, as computed by threads that each have a part of the model."""
    group = ThreadGroup(size)
    config = ModelConfig.from_directory(directory)

    def compute(rank: int) -> torch.Tensor:
        own = group.of(rank)
        with torch.inference_mode():
            try:
                place = Place(Stage(0, 1), Part(rank, size))
                part = load_part(str(directory), config, LoadOptions(), place, own)  # type: ignore[arg-type]
                return logits_of(part, own.joined)
            except BaseException:
                group.abort()
                raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(compute, range(size)))


def check_split(directory: Path, size: int) -> None:
    config = ModelConfig.from_directory(directory)
    with torch.inference_mode():
        expected = logits_of(load_model(str(directory), config, LoadOptions()), lambda logits: logits)
    assert expected.std() > 0.1
    for logits in split_logits(directory, size):
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("size", [2, 3])
def test_the_parts_of_every_architecture_give_its_logits(
    tmp_path: Path, architecture: str, size: int
) -> None:
    """With 3 parts there are more parts than KV heads."""
    make_tiny_model(tmp_path, architecture)
    check_split(tmp_path, size)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "size"), [(9, 3, 2), (9, 3, 3), (9, 3, 4), (5, 1, 3), (6, 6, 4), (4, 2, 4)]
)
def test_heads_that_do_not_divide_are_split_unevenly(
    tmp_path: Path, num_heads: int, num_kv_heads: int, size: int
) -> None:
    make_tiny_model(
        tmp_path,
        hidden_size=4 * num_heads,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        attention_bias=True,
        mlp_bias=True,
        num_hidden_layers=2,
    )
    check_split(tmp_path, size)


@pytest.mark.parametrize("case", CASES)
def test_the_parts_of_quantised_weights_give_the_logits_of_the_whole(tmp_path: Path, case: str) -> None:
    """Also where a part has neither whole groups nor whole words, or its inputs are in any group."""
    check_split(quantised_checkpoint(tmp_path, case), 3)


def quantised_checkpoint(folder: Path, case: str) -> Path:
    writer, form = CASES[case]
    make_tiny_model(folder / "plain", **SIZES)
    path = folder / "quantised"
    write_checkpoint(folder / "plain", path, lambda name: None if name == "lm_head" else writer, form)
    return path


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM"])
def test_the_parts_of_a_gguf_file_give_the_logits_of_the_whole(tmp_path: Path, architecture: str) -> None:
    """Its embedding and head are quantised too; biases are rows; llama's queries have another order."""
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    path = tmp_path / "model.gguf"
    write_gguf(path, make_tiny_model(tmp_path, architecture, head_dim=16, **sizes), "Q8_0")
    check_split(path, 2)


def test_parts_of_an_mlp_are_whole_groups_where_its_weights_are_quantised(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, intermediate_size=640, num_hidden_layers=1)
    plain = ModelConfig.from_directory(tmp_path)
    quantised = replace(plain, quantised=BlocksOfFile())

    def widths(config: ModelConfig, size: int) -> list[int]:
        return [len(Part(rank, size).features(config)) for rank in range(size)]

    assert widths(plain, 3) == [214, 213, 213]
    assert widths(quantised, 3) == [256, 256, 128]
    assert widths(quantised, 7) == [128, 128, 128, 64, 64, 64, 64]
    # 648 features are no whole groups of 32.
    assert widths(replace(quantised, intermediate_size=648), 3) == [216, 216, 216]


@pytest.mark.parametrize("rank", [0, 1])
def test_numbers_of_few_bits_stay_such_where_no_group_is_cut(tmp_path: Path, rank: int) -> None:
    part = down_projection(quantised_checkpoint(tmp_path, "packed 4 bits"), rank)
    nibbles = kept_nibbles(part)
    assert nibbles is not None
    torch.testing.assert_close(nibbles.matrix(), part.rows(0, 64), rtol=1e-6, atol=0)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("case", ["w8a8", "fp8 blocks, ragged", "mxfp4"])
def test_what_a_gpu_multiplies_by_stays_such(tmp_path: Path, case: str, rank: int) -> None:
    part = down_projection(quantised_checkpoint(tmp_path, case), rank)
    form = kept_for_gpu(part)
    assert form is not None
    torch.testing.assert_close(form.matrix(), part.rows(0, 64), rtol=1e-6, atol=0)


def down_projection(directory: Path, rank: int) -> RowsPart:
    """Half of a layer's down projection."""
    config = ModelConfig.from_directory(directory)
    whole = SafetensorsSource(SafetensorsFiles(directory), config.quantised)
    source = SplitSource(whole, config, Part(rank, 2))
    shape = (config.hidden_size, len(Part(rank, 2).features(config)))
    part = source.read("model.layers.0.mlp.down_proj.weight", shape)
    assert isinstance(part, RowsPart)
    assert part.shape == shape
    return part


def test_a_group_that_is_cut_at_its_beginning_is_not_kept() -> None:
    weight = NibbleWeight.rounded(torch.randn(8, 96, generator=torch.Generator().manual_seed(0)))
    assert weight is not None
    part = weight.part(range(2, 5), range(32, 80))
    assert part is not None
    assert torch.equal(part.matrix(), weight.matrix()[2:5, 32:80])
    assert weight.part(range(8), range(80, 96)) is None


def test_a_tied_head_is_split_with_the_embedding(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, tie_word_embeddings=True, num_hidden_layers=1)
    check_split(tmp_path, 2)
    path = tmp_path / "model.safetensors"
    stored = load_file(path)
    head = stored["model.embed_tokens.weight"].clone()
    save_file({**stored, "lm_head.weight": head}, path)
    check_split(tmp_path, 2)
    head[-1, 0] += 1
    save_file({**stored, "lm_head.weight": head}, path)
    config, last = ModelConfig.from_directory(tmp_path), Place(Stage(0, 1), Part(1, 2))
    with pytest.raises(ModelError, match=r"lm_head\.weight' is not the embedding"):
        load_part(str(tmp_path), config, LoadOptions(), last, ThreadGroup(2).of(1))  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [0, 1, 5, 9, 97])
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_parts_lie_one_after_the_other_and_the_first_are_larger(count: int, size: int) -> None:
    parts = [Part(rank, size).of(count) for rank in range(size)]
    assert [each for part in parts for each in part] == list(range(count))
    widths = [len(part) for part in parts]
    assert widths == sorted(widths, reverse=True)
    assert widths[0] - widths[-1] <= 1


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(9, 3), (14, 2), (32, 8), (7, 1), (12, 12)])
def test_every_query_head_is_at_one_rank_with_its_kv_head(
    tmp_path: Path, num_heads: int, num_kv_heads: int
) -> None:
    make_tiny_model(
        tmp_path,
        hidden_size=4 * num_heads,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        num_hidden_layers=1,
    )
    config = ModelConfig.from_directory(tmp_path)
    for size in range(1, num_heads + 1):
        parts = [Part(rank, size).heads(config) for rank in range(size)]
        assert [each for heads, _ in parts for each in heads] == list(range(num_heads))
        for rank, (heads, kv_heads) in enumerate(parts):
            own = Part(rank, size).config(config)
            assert own.num_heads % own.num_kv_heads == 0
            queries = own.num_heads // own.num_kv_heads
            group = num_heads // num_kv_heads
            for place, head in enumerate(heads):
                assert kv_heads[place // queries] == head // group


def test_more_ranks_than_kv_heads_have_different_numbers_of_query_heads(tmp_path: Path) -> None:
    make_tiny_model(
        tmp_path, num_attention_heads=16, num_key_value_heads=2, hidden_size=64, num_hidden_layers=1
    )
    parts = part_configs(ModelConfig.from_directory(tmp_path), 3)
    assert [each.num_heads // each.num_kv_heads for each in parts] == [4, 4, 8]


def test_parts_of_a_kv_cache_have_the_same_number_of_blocks(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, num_attention_heads=9, num_key_value_heads=3, num_hidden_layers=1)
    config = ModelConfig.from_directory(tmp_path)
    assert [Part(rank, 2).kv_cache_bytes(config, 3000) for rank in range(2)] == [2000, 1000]
    # A KV head that several ranks have takes memory at each of them.
    assert [Part(rank, 4).kv_cache_bytes(config, 4000) for rank in range(4)] == [1000] * 4
    assert Part(0, 1).kv_cache_bytes(config, 1234) == 1234


def test_more_ranks_than_heads_are_refused(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, num_hidden_layers=1)
    config = ModelConfig.from_directory(tmp_path)
    check_can_split(EngineConfig(model_dir="m", tensor_parallel_size=6), config)
    with pytest.raises(ConfigError, match=r"^tensor_parallel_size = 7: expected 1 … 6, the number of heads"):
        check_can_split(EngineConfig(model_dir="m", tensor_parallel_size=7), config)


def source_of(directory: Path, rank: int, size: int) -> SplitSource:
    whole = SafetensorsSource(SafetensorsFiles(directory), None)
    return SplitSource(whole, ModelConfig.from_directory(directory), Part(rank, size))


def test_the_parts_of_a_weight_are_its_slices(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, num_hidden_layers=1, attention_bias=True)
    stored = load_file(tmp_path / "model.safetensors")
    first, second = source_of(tmp_path, 0, 2), source_of(tmp_path, 1, 2)
    attention = "model.layers.0.self_attn"
    shapes = {
        f"{attention}.q_proj.weight": (30, 36),
        f"{attention}.k_proj.bias": (10,),
        f"{attention}.o_proj.weight": (36, 30),
        "model.layers.0.mlp.down_proj.weight": (36, 26),
    }
    for name, shape in shapes.items():
        parts = [each.read(name, shape) for each in (first, second)]
        assert all(isinstance(part, torch.Tensor) and tuple(part.shape) == shape for part in parts)
        dimension = 1 if "o_proj" in name or "down_proj" in name else 0
        assert torch.equal(torch.cat(parts, dim=dimension), stored[name])  # type: ignore[arg-type]
    bias = f"{attention}.o_proj.bias"
    assert torch.equal(first.read(bias, (36,)), stored[bias])  # type: ignore[arg-type]
    assert not second.read(bias, (36,)).any()  # type: ignore[union-attr]
    assert len(second.read("lm_head.weight", (97, 36))) == 48  # type: ignore[arg-type]


def test_a_matrix_without_a_rule_is_refused_by_name(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, num_hidden_layers=1)
    with pytest.raises(ModelError, match=r"'model\.layers\.0\.mlp\.gate\.weight' can not be split"):
        source_of(tmp_path, 0, 2).read("model.layers.0.mlp.gate.weight", (8, 36))


def test_a_weight_of_another_shape_is_refused_with_the_whole_shape(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, num_hidden_layers=1)
    stored = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    save_file({**stored, name: torch.zeros(50, 36)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"has shape \(50, 36\), config.json asks for \(60, 36\)"):
        source_of(tmp_path, 1, 2).read(name, (30, 36))


def resident_kib(path: Path) -> int:
    """Kibibytes of this process's memory that are pages of the file."""
    lines = Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines()
    places = [place for place, line in enumerate(lines) if line.endswith(str(path))]
    found = [line for place in places for line in lines[place + 1 : place + 8] if line.startswith("Rss:")]
    return sum(int(line.split()[1]) for line in found)


def test_only_the_pages_of_a_part_are_read(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, num_hidden_layers=1, vocab_size=100_000)
    path = tmp_path / "model.safetensors"
    kib = path.stat().st_size // 1024
    source = source_of(tmp_path, 1, 4)
    table = source.read("model.embed_tokens.weight", (100_000, 36))
    before = resident_kib(path)
    assert isinstance(table, torch.Tensor)
    assert table.sum().isfinite()
    # A part is an eighth of the file; the system reads some pages around it.
    assert 0.1 * kib < resident_kib(path) - before < 0.3 * kib
