"""What a quantised checkpoint says about itself is honoured or refused by name; hostile files are refused."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AwqConfig, FineGrainedFP8Config, GPTQConfig

from helpers import quantised_checkpoints as write
from helpers.quantised_cases import AWQ, BLOCKS, CASES, GPTQ, SIZES, group_of, tensors
from helpers.quantised_checkpoints import Writer, write_checkpoint
from helpers.tiny_models import make_tiny_model
from naiad.config import ModelConfig
from naiad.config.quantised import read_quantised_weights
from naiad.errors import ModelError
from naiad.models import load_model
from naiad.models.checkpoint_cache import CheckpointCache
from naiad_kernels.linear import LoadOptions

LAYER = "model.layers.1.mlp.up_proj"
PACKED = tensors("pack-quantized", group_of(4, 32))


def load(directory: Path) -> None:
    load_model(str(directory), ModelConfig.from_directory(directory), LoadOptions())


def describe(config: dict[str, Any], name: str = LAYER) -> Any:
    quantised = read_quantised_weights({"quantization_config": config})
    assert quantised is not None
    return quantised.layer(name)


@pytest.fixture(scope="module")
def plain_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plain") / "model"
    make_tiny_model(path, **SIZES)
    return path


def quantised_dir(
    plain_dir: Path, target: Path, writer_of: Callable[[str], Writer | None], config: dict[str, Any]
) -> Path:
    write_checkpoint(plain_dir, target, writer_of, config)
    return target


def body(writer: Writer) -> Callable[[str], Writer | None]:
    return lambda layer: None if layer == "lm_head" else writer


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quant_method = 'bitsandbytes'"),
        ({"bits": 4}, "quant_method = None"),
        ({**GPTQ, "bits": 5}, "bits = 5"),
        ({**GPTQ, "bits": True}, "bits = True"),
        ({**GPTQ, "group_size": 0}, "group_size = 0"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format = 'marlin'"),
        ({**GPTQ, "desc_act": 1}, "desc_act = 1"),
        ({**GPTQ, "new_key": 1}, "new_key = 1"),
        ({**GPTQ, "dynamic": {"re(": {}}}, r"dynamic = 're\('"),
        ({**GPTQ, "dynamic": {"a": {"bits": 7}}}, "dynamic.a.bits = 7"),
        ({**AWQ, "version": "gemv"}, "version = 'gemv'"),
        ({**AWQ, "w_bit": 8}, "w_bit = 8"),
        ({**AWQ, "zero_point": False}, "zero_point = False"),
        ({**AWQ, "format": "gemv"}, "format = 'gemv'"),
        ({**AWQ, "checkpoint_format": "marlin"}, "checkpoint_format = 'marlin'"),
        ({**AWQ, "desc_act": True}, "desc_act = True"),
        ({**BLOCKS, "fmt": "e5m2"}, "fmt = 'e5m2'"),
        ({**BLOCKS, "expert_dtype": "int4"}, "expert_dtype = 'int4'"),
        ({**BLOCKS, "modules_to_convert": ["embed_tokens"]}, "modules_to_convert = "),
        ({**BLOCKS, "weight_block_size": [0, 128]}, "weight_block_size"),
        ({**PACKED, "quantization_status": "frozen"}, "quantization_status = 'frozen'"),
        ({**PACKED, "format": "marlin-24"}, "format = 'marlin-24'"),
        ({**PACKED, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        ({**PACKED, "transform_config": {"config_groups": {"a": {}}}}, "transform_config"),
        ({**PACKED, "ignore": ["re:("]}, "ignore = '\\('"),
        (tensors("pack-quantized", group_of(9, 32)), "num_bits = 9"),
        (tensors("pack-quantized", {**group_of(4, 32), "dynamic": True}), "dynamic = True"),
        (tensors("pack-quantized", {**group_of(4, 32), "type": "float"}), "type = 'float'"),
        (tensors("pack-quantized", {"num_bits": 4, "strategy": "group"}), "group_size = None"),
        (tensors("nvfp4-pack-quantized", group_of(4, 16)), "format = 'nvfp4-pack-quantized'"),
        (tensors("float-quantized", group_of(8, -1)), "type = 'int'"),
        (tensors("pack-quantized", {**group_of(4, 32), "extra": 1}), "weights.extra = 1"),
        ({**PACKED, "config_groups": {}}, "config_groups"),
    ],
)
def test_a_key_is_refused_by_name(config: dict[str, Any], key: str) -> None:
    with pytest.raises(ModelError, match=key):
        read_quantised_weights({"quantization_config": config})


@pytest.mark.parametrize(
    ("config", "method"),
    [
        (FineGrainedFP8Config(), "fp8"),
        (FineGrainedFP8Config(activation_scheme="static", weight_block_size=None), "fp8"),
        (AwqConfig(bits=4), "awq"),
        (GPTQConfig(bits=4), "gptq"),
    ],
)
def test_what_transformers_writes_is_read(config: Any, method: str) -> None:
    """It writes all keys that its class has, with their defaults."""
    written = json.loads(json.dumps(config.to_dict()))
    quantised = read_quantised_weights({"quantization_config": written})
    assert quantised is not None
    assert quantised.method == method
    assert quantised.layer(LAYER) is not None


def test_gptq_overrides_layers_by_pattern() -> None:
    dynamic = {r"-:.*\.0\..*": {}, r"+:.*up_proj": {"bits": 8}, r".*down_proj": {"group_size": 64}}
    config = {**GPTQ, "dynamic": dynamic}
    assert describe(config, "model.layers.0.mlp.up_proj") is None
    assert describe(config).bits == 8
    assert describe(config, "model.layers.1.mlp.down_proj").group_size == 64
    assert describe(config, "model.layers.1.self_attn.q_proj").bits == 4
    assert describe(config, "lm_head") is None
    assert describe({**GPTQ, "lm_head": True}, "lm_head").bits == 4


def test_names_come_before_patterns_and_patterns_before_classes() -> None:
    config = tensors("pack-quantized", group_of(4, 32))
    groups = config["config_groups"]
    groups["group_1"] = {"targets": ["re:.*up_proj$"], "weights": {**group_of(8, -1), "type": "int"}}
    groups["group_2"] = {"targets": [LAYER], "weights": {**group_of(2, 32), "type": "int"}}
    config["ignore"] = ["re:.*down_proj", "lm_head"]
    assert describe(config).bits == 2
    assert describe(config, "model.layers.0.mlp.up_proj").bits == 8
    assert describe(config, "model.layers.0.mlp.gate_proj").bits == 4
    assert describe(config, "model.layers.0.mlp.down_proj") is None
    assert describe(config, "lm_head") is None


def test_a_pattern_that_never_ends_is_refused() -> None:
    config = {**PACKED, "ignore": ["re:((.|..)+)+[0-9]{9}"]}
    with pytest.raises(ModelError, match=r"matches .* in 1 s"):
        describe(config, "model.layers.1.mlp.up_proj" * 3)


def test_groups_of_different_formats(plain_dir: Path, tmp_path: Path) -> None:
    config = tensors("mixed-precision", group_of(4, 32), format="pack-quantized")
    eight = {"num_bits": 8, "type": "float", "strategy": "channel"}
    config["config_groups"]["group_1"] = {
        "targets": ["re:.*self_attn.*"],
        "weights": eight,
        "format": "float-quantized",
    }
    config["ignore"] = ["re:.*down_proj", "lm_head"]

    def writer_of(layer: str) -> Writer | None:
        if layer == "lm_head" or layer.endswith("down_proj"):
            return None
        return write.float8(None) if "self_attn" in layer else write.packed(4, 32, True)

    load(quantised_dir(plain_dir, tmp_path / "model", writer_of, config))


def test_a_quantised_head_is_read(plain_dir: Path, tmp_path: Path) -> None:
    load(
        quantised_dir(
            plain_dir, tmp_path / "gptq", lambda _: write.gptq(4, 32, sym=True), {**GPTQ, "lm_head": True}
        )
    )
    config = {**PACKED, "ignore": []}
    load(quantised_dir(plain_dir, tmp_path / "packed", lambda _: write.packed(4, 32, True), config))


def rewrite(directory: Path, changes: dict[str, torch.Tensor | None]) -> None:
    stored = {**load_file(directory / "model.safetensors"), **changes}
    kept = {name: tensor for name, tensor in stored.items() if tensor is not None}
    save_file(kept, directory / "model.safetensors")


@pytest.mark.parametrize(
    ("case", "part", "change", "message"),
    [
        ("gptq", "scales", lambda t: t * 0, "scale that is not a positive finite number"),
        ("gptq", "scales", lambda t: t * float("nan"), "scale that is not a positive finite number"),
        ("gptq", "scales", lambda t: t[:1], "has shape"),
        ("gptq", "scales", None, "is missing"),
        ("gptq", "qweight", lambda t: t.long(), "has dtype torch.int64"),
        ("gptq", "qweight", lambda t: t[:-1], "has shape"),
        ("gptq", "qzeros", lambda t: t + 1, "zero points other than 7 or 8"),
        ("gptq", "g_idx", lambda t: t + 1, r"has a group outside \[0, 2\)"),
        ("gptq", "g_idx", lambda t: t - 1, r"has a group outside \[0, 2\)"),
        ("gptq", "weight", lambda _: torch.zeros(192, 64), "no place for"),
        ("gptq by activation", "g_idx", None, "desc_act = true needs it"),
        ("awq", "qzeros", None, "is missing"),
        ("packed 4 bits", "weight_packed", lambda t: t[:, :-1], "has shape"),
        ("packed 4 bits", "weight_packed", None, "is missing"),
        ("packed 4 bits", "weight_shape", lambda t: t * 2, r"is \[384, 128\]"),
        ("packed old zero points", "weight_zero_point", lambda t: t + 50, "more than 4 bits"),
        ("packed by activation", "weight_g_idx", None, "is missing"),
        ("w8a8", "weight", lambda t: t.float(), "has dtype torch.float32"),
        ("w8a8", "weight_scale", lambda t: t * -1, "scale that is not a positive finite number"),
        ("fp8 blocks, ragged", "weight", lambda t: (t.float() * float("nan")).to(t.dtype), "not finite"),
        ("fp8 blocks, ragged", "weight_scale_inv", lambda t: t[:, :0], "has shape"),
        ("mxfp4", "weight_scale", lambda t: t | 255, "stands for NaN"),
        ("mxfp4", "weight_scale", lambda t: t * 0 + 254, "not finite"),
    ],
)
def test_a_bad_tensor_is_named(
    plain_dir: Path, tmp_path: Path, case: str, part: str, change: Any, message: str
) -> None:
    writer, config = CASES[case]
    directory = quantised_dir(plain_dir, tmp_path / "model", body(writer), config)
    stored = load_file(directory / "model.safetensors")
    name = f"{LAYER}.{part}"
    rewrite(directory, {name: None if change is None else change(stored.get(name)).contiguous()})
    with pytest.raises(ModelError, match=rf"{LAYER}[^\n]*{message}|{message}[^\n]*{LAYER}"):
        load(directory)


def test_a_layer_that_is_quantised_against_its_configuration_is_refused(
    plain_dir: Path, tmp_path: Path
) -> None:
    config = {**AWQ, "modules_to_not_convert": ["up_proj"]}
    directory = quantised_dir(plain_dir, tmp_path / "model", body(write.awq(32)), config)
    with pytest.raises(ModelError, match=r"up_proj\.qweight' is quantised, and config\.json says"):
        load(directory)


def test_a_head_that_is_tied_and_quantised_is_refused(plain_dir: Path, tmp_path: Path) -> None:
    config = {**GPTQ, "lm_head": True}
    directory = quantised_dir(plain_dir, tmp_path / "model", lambda _: write.gptq(4, 32, sym=True), config)
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": True}))
    with pytest.raises(ModelError, match=r"lm_head\.qweight"):
        load(directory)


def test_biases_of_zeros_that_old_exporters_add_are_passed_over(plain_dir: Path, tmp_path: Path) -> None:
    writer, config = CASES["gptq"]
    directory = quantised_dir(plain_dir, tmp_path / "model", body(writer), config)
    rewrite(directory, {f"{LAYER}.bias": torch.zeros(192)})
    load(directory)
    rewrite(directory, {f"{LAYER}.bias": torch.ones(192)})
    with pytest.raises(ModelError, match=rf"{LAYER}\.bias"):
        load(directory)


def test_scales_of_a_kv_cache_are_passed_over_if_the_configuration_speaks_of_one(
    plain_dir: Path, tmp_path: Path
) -> None:
    writer, config = CASES["packed 4 bits"]
    directory = quantised_dir(
        plain_dir, tmp_path / "model", body(writer), {**config, "kv_cache_scheme": {"num_bits": 8}}
    )
    rewrite(directory, {"model.layers.0.self_attn.k_scale": torch.ones(1)})
    load(directory)


@pytest.mark.parametrize(
    ("case", "name"), [("gptq", "quantize_config.json"), ("awq old keys", "quant_config.json")]
)
def test_old_checkpoints_have_a_file_of_their_own_for_the_keys(
    plain_dir: Path, tmp_path: Path, case: str, name: str
) -> None:
    writer, config = CASES[case]
    directory = quantised_dir(plain_dir, tmp_path / "model", body(writer), config)
    before = CheckpointCache(directory).fingerprint
    described = json.loads((directory / "config.json").read_text())
    del described["quantization_config"]
    (directory / "config.json").write_text(json.dumps(described))
    with pytest.raises(ModelError, match=r"weight' is missing"):
        load(directory)
    without = CheckpointCache(directory).fingerprint
    (directory / name).write_text(json.dumps({key: config[key] for key in config if key != "quant_method"}))
    assert len({before, without, CheckpointCache(directory).fingerprint}) == 3
    (directory / "model.safetensors").rename(directory / "gptq_model-4bit-32g.safetensors")
    load(directory)
    (directory / name).write_text('{"bits": 5}')
    with pytest.raises(ModelError, match="bits = 5"):
        load(directory)


# Of each format: its file is changed so many times. `NUM_MUTATIONS` of them are a test that is marked slow.
NUM_QUICK, NUM_MUTATIONS = 40, 2000
FUZZED = ("gptq by activation", "awq", "packed 3 bits dense", "w8a8", "fp8 blocks, ragged", "mxfp4")


def mutated(data: bytes, chance: random.Random) -> bytes:
    """Change, cut, insert or exchange bytes, mostly in the header of the file."""
    mutant = bytearray(data)
    header = 8 + int.from_bytes(data[:8], "little")
    for _ in range(chance.randint(1, 4)):
        end = min(header if chance.random() < 0.8 else len(mutant), len(mutant))
        place = chance.randrange(max(end, 1))
        kind = chance.randrange(5)
        if kind == 0:
            mutant[place : place + 1] = bytes([chance.randrange(256)])
        elif kind == 1:
            del mutant[place : place + chance.choice((1, 8, 100))]
        elif kind == 2:
            mutant[place:place] = chance.randbytes(chance.choice((1, 8)))
        elif kind == 3:
            mutant[place : place + 1] = chance.choice(b'0123456789"{}[]:,-').to_bytes(1, "little")
        else:
            del mutant[place + 1 :]
    return bytes(mutant)


def is_refused_or_sound(directory: Path) -> bool:
    """Load a mutant; anything but an error of ours or finite weights fails the test."""
    try:
        load(directory)
    except ModelError:
        return True
    return False


def fuzz_file(directory: Path, seed: str, count: int) -> None:
    path = directory / "model.safetensors"
    whole, chance = path.read_bytes(), random.Random(seed)
    num_refused = 0
    for _ in range(count):
        path.write_bytes(mutated(whole, chance))
        num_refused += is_refused_or_sound(directory)
    # A changed number of a weight is a weight; most changes are to the header.
    assert num_refused > count // 2


def fuzz_config(config: dict[str, Any], seed: str, count: int) -> None:
    """Replace values deep in a configuration; it is read or refused, and never raises anything else."""
    chance = random.Random(seed)
    junk: tuple[Any, ...] = (
        None,
        True,
        -1,
        0,
        3,
        1 << 70,
        1.5,
        float("nan"),
        "",
        "re:(",
        "group",
        [],
        [1],
        {},
        {"a": 1},
    )
    for _ in range(count):
        mutant = json.loads(json.dumps(config))
        place: Any = mutant
        while True:
            key = chance.choice(list(place) if isinstance(place, dict) else list(range(len(place))))
            if isinstance(place[key], (dict, list)) and place[key] and chance.random() < 0.7:
                place = place[key]
                continue
            place[key] = chance.choice(junk)
            break
        try:
            quantised = read_quantised_weights({"quantization_config": mutant})
            if quantised is not None:
                quantised.layer(LAYER)
        except ModelError:
            continue


@pytest.mark.parametrize("case", FUZZED)
def test_mutated_files_and_configurations_are_refused(plain_dir: Path, tmp_path: Path, case: str) -> None:
    writer, config = CASES[case]
    directory = quantised_dir(plain_dir, tmp_path / "model", body(writer), config)
    fuzz_file(directory, case, NUM_QUICK)
    fuzz_config(config, case, 10 * NUM_QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("case", FUZZED)
def test_many_mutations_are_refused(plain_dir: Path, tmp_path: Path, case: str) -> None:
    writer, config = CASES[case]
    directory = quantised_dir(plain_dir, tmp_path / "model", body(writer), config)
    fuzz_file(directory, f"many {case}", NUM_MUTATIONS)
    fuzz_config(config, f"many {case}", NUM_MUTATIONS)
