"""Packed weights that came with a checkpoint decide about numbers, and never about what native code reads."""

from __future__ import annotations

import json
import logging
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.array_files import Arrays, Notes, replace_table, rewrite, table_of
from helpers.mutations import mutated
from helpers.tiny_models import make_tiny_model
from naiad.config import ModelConfig
from naiad.models import load_model, registry
from naiad.models.checkpoint_cache import CheckpointCache
from naiad_kernels.linear import LoadOptions
from naiad_kernels.native.panels import NativeWeight

OPTIONS = LoadOptions(torch.float32, native=True, quantization="int8")
WEIGHT = "model.layers.1.mlp.down_proj"
PANELS, SCALES = f"{WEIGHT}/panels", f"{WEIGHT}/scales"
QKV = "+".join(f"model.layers.0.self_attn.{each}_proj" for each in "qkv")
BIAS = f"{QKV}/bias"
TABLE, NORM = "model.embed_tokens", "model.norm.weight"


@pytest.fixture(autouse=True)
def user_cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("user_cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(path))
    return path


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with biases and packed weights."""
    path = tmp_path_factory.mktemp("original")
    make_tiny_model(path, "Qwen2ForCausalLM")
    load(path)
    return path


@pytest.fixture
def model_dir(tmp_path: Path, original: Path) -> Path:
    """A copy that brings its packed weights along."""
    return Path(shutil.copytree(original, tmp_path / "model"))


def load(directory: Path) -> Any:
    config = ModelConfig.from_directory(directory)
    return load_model(str(directory), config, OPTIONS, CheckpointCache(directory))


def weights_of(model_dir: Path) -> Path:
    (path,) = model_dir.rglob("*.weights")
    return path


def more(name: str, dim: int = 0) -> Callable[[Arrays, Notes], None]:
    """Twice as much of an array."""

    def change(arrays: Arrays, notes: Notes) -> None:
        arrays[name] = torch.cat([arrays[name]] * 2, dim)

    return change


def less(name: str, dim: int = 0) -> Callable[[Arrays, Notes], None]:
    def change(arrays: Arrays, notes: Notes) -> None:
        arrays[name] = arrays[name].narrow(dim, 0, arrays[name].shape[dim] - 1)

    return change


def cast(name: str, dtype: torch.dtype) -> Callable[[Arrays, Notes], None]:
    def change(arrays: Arrays, notes: Notes) -> None:
        arrays[name] = arrays[name].to(dtype)

    return change


def noted(**values: Any) -> Callable[[Arrays, Notes], None]:
    return lambda arrays, notes: notes[WEIGHT].update(values)


CHANGES: dict[str, Callable[[Arrays, Notes], Any]] = {
    "more panels": more(PANELS),
    "fewer panels": less(PANELS),
    "wider panels": more(PANELS, 1),
    "narrower panels": less(PANELS, 1),
    "flat panels": lambda arrays, notes: arrays.update({PANELS: arrays[PANELS].flatten()}),
    "panels of another dtype": cast(PANELS, torch.int8),
    "a longer bias": more(BIAS),
    "a shorter bias": less(BIAS),
    "a bias in 16 bits": cast(BIAS, torch.bfloat16),
    "longer scales": more(SCALES),
    "shorter scales": less(SCALES),
    "no scales": lambda arrays, notes: arrays.pop(SCALES),
    "no panels": lambda arrays, notes: arrays.pop(PANELS),
    "another product": noted(product="FLOAT_BY_FLOAT"),
    "a product of four bits": noted(product="INT4_BY_INT8"),
    "an unknown product": noted(product="INT2_BY_INT2"),
    "a number as the product": noted(product=3),
    "no product": lambda arrays, notes: notes[WEIGHT].clear(),
    "no notes": lambda arrays, notes: notes.clear(),
    "a longer table": more(TABLE),
    "a shorter table": less(TABLE),
    "a wider table": more(TABLE, 1),
    "a table of whole numbers": cast(TABLE, torch.int8),
    "no table": lambda arrays, notes: arrays.pop(TABLE),
    "a longer norm": more(NORM),
    "a shorter norm": less(NORM),
    "a norm in 16 bits": cast(NORM, torch.float16),
    "no norm": lambda arrays, notes: arrays.pop(NORM),
    "the weight of another layer": lambda arrays, notes: arrays.update({PANELS: arrays["lm_head/panels"]}),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_weights_that_do_not_fit_are_packed_anew(
    model_dir: Path, caplog: pytest.LogCaptureFixture, change: Callable[[Arrays, Notes], Any]
) -> None:
    path = weights_of(model_dir)
    whole = path.read_bytes()
    rewrite(path, change)
    assert path.read_bytes() != whole
    with caplog.at_level(logging.INFO):
        load(model_dir)
    (line,) = [each.getMessage() for each in caplog.records if "is not used" in each.getMessage()]
    assert line.startswith(f"{path} is not used: ")
    assert path.read_bytes() == whole


def test_features_in_a_note_are_not_believed(model_dir: Path) -> None:
    rewrite(weights_of(model_dir), noted(in_features=1 << 40, out_features=1 << 40))
    down = load(model_dir)._layers[1].down
    assert (down.out_features, down.in_features) == (36, 52)


def test_where_the_directory_can_not_be_written_the_users_own_file_is_used(
    model_dir: Path, user_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rewrite(weights_of(model_dir), more(PANELS))
    own = CheckpointCache._private
    monkeypatch.setattr(CheckpointCache, "folder", property(lambda self: own(self, makes=True)))
    load(model_dir)
    assert list(user_cache.rglob("*.weights"))
    monkeypatch.setattr(registry, "packing", None)
    load(model_dir)


def test_a_link_that_came_with_a_checkpoint_is_not_followed(
    tmp_path: Path, user_cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    make_tiny_model(tmp_path)
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (tmp_path / ".naiad").symlink_to(elsewhere)
    for _ in range(2):
        load(tmp_path)
    assert list(elsewhere.iterdir()) == []
    assert list(user_cache.rglob("*.weights"))
    (elsewhere / "found").touch()
    assert CheckpointCache(tmp_path).find("found") == []


def test_damaged_tables_never_end_a_start(model_dir: Path) -> None:
    path, draw = weights_of(model_dir), random.Random(5)
    whole = path.read_bytes()
    table = json.dumps(table_of(path)).encode()
    shapes = {name: array["shape"] for name, array in table_of(path)["arrays"].items()}
    for _ in range(60):
        path.write_bytes(whole)
        replace_table(path, mutated(table, draw, [table]))
        model = load(model_dir)
        for layer in model._layers:
            for weight in (layer.attention.qkv, layer.attention.output, layer.gate_up, layer.down):
                weight.check()
        assert list(model._embedding.table.shape) == shapes[TABLE]
        assert list(model._final_norm.shape) == shapes[NORM]


@pytest.mark.parametrize("field", ["panels", "bias", "scales"])
def test_a_weight_without_all_that_native_code_reads_can_not_be_made(field: str) -> None:
    whole = NativeWeight.quantised(torch.randn(40, 70), torch.randn(40))
    arrays = {each: getattr(whole, each) for each in ("panels", "bias", "scales")}
    for array in (arrays[field][:-1], torch.cat([arrays[field]] * 2), arrays[field].half()):
        changed = {**arrays, field: array}
        with pytest.raises(ValueError, match=field):
            NativeWeight(**changed, product=whole.product, in_features=70, out_features=40)
