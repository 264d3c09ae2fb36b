"""`naiad repository` with presets: the models' names, and how they refer to each other."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from helpers.blank_checkpoint import write_checkpoint
from helpers.doc_names import ROOT
from naiad.cli.main import main
from naiad.cli.repository.model_entries import ModelEntry, find_repository, read_model, read_repository
from naiad.cli.repository.presets import PRESETS, shipped_model
from naiad.cli.repository.served_models import served_models, steps

TRTLLM = ["ensemble", "postprocessing", "preprocessing", "tensorrt_llm", "tensorrt_llm_bls"]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    write_checkpoint(folder)
    return folder


def naiad(action: str, checkpoint: Path, name: str, folder: Path, *options: str) -> int:
    words = ["--model", str(checkpoint), "--name", name, "--kv-cache-bytes", "1000", *options, str(folder)]
    return main(["repository", action, *words])


def entries(folder: Path) -> dict[str, ModelEntry]:
    return {entry.name: entry for entry in read_repository(folder)}


def decoupled(models: dict[str, ModelEntry]) -> set[str]:
    return {name for name, entry in models.items() if entry.config.model_transaction_policy.decoupled}


def test_every_model_of_the_shipped_repository_is_in_naiads_preset() -> None:
    assert set(PRESETS["naiad"]) == {entry.name for entry in read_repository(find_repository(None))}


@pytest.mark.parametrize("preset", PRESETS)
def test_every_shipped_model_is_there(preset: str) -> None:
    for name in PRESETS[preset]:
        assert read_model(shipped_model(name)).config.name == name


def test_trtllm_has_the_references_names_and_the_same_tensors(tmp_path: Path, checkpoint: Path) -> None:
    assert naiad("create", checkpoint, "first", tmp_path / "made", "--preset", "trtllm") == 0
    made = entries(tmp_path / "made")
    assert sorted(made) == TRTLLM
    assert steps(made["ensemble"]) == ["preprocessing", "tensorrt_llm", "postprocessing"]
    for shipped, name in PRESETS["trtllm"].items():
        assert made[name].config.name == name
        assert made[name].config.input == read_model(shipped_model(shipped)).config.input
        assert made[name].config.output == read_model(shipped_model(shipped)).config.output
    for name in ("postprocessing", "tensorrt_llm_bls"):
        assert made[name].parameters["llm_model_name"] == "tensorrt_llm"
    assert decoupled(made) == {"tensorrt_llm", "postprocessing", "tensorrt_llm_bls"}
    (model,) = served_models(list(made.values()))
    assert (model.engine.name, model.entry_point.name) == ("tensorrt_llm", "ensemble")
    assert sorted(entry.name for entry in model.entries) == TRTLLM


def test_no_decoupled_is_unary_in_every_step(tmp_path: Path, checkpoint: Path) -> None:
    options = ("--preset", "trtllm", "--no-decoupled")
    assert naiad("create", checkpoint, "first", tmp_path / "made", *options) == 0
    assert decoupled(entries(tmp_path / "made")) == set()


def test_vllm_is_one_model_before_the_engines(tmp_path: Path, checkpoint: Path) -> None:
    options = ("--preset", "vllm", "--max-batch-size", "4")
    assert naiad("create", checkpoint, "first", tmp_path / "made", *options) == 0
    made = entries(tmp_path / "made")
    assert sorted(made) == ["llm", "vllm_model"]
    assert (made["llm"].config.max_batch_size, made["vllm_model"].config.max_batch_size) == (4, 0)
    (model,) = served_models(list(made.values()))
    assert (model.engine.name, model.entry_point.name) == ("llm", "vllm_model")


def test_presets_stand_side_by_side(tmp_path: Path, checkpoint: Path) -> None:
    assert naiad("create", checkpoint, "first", tmp_path / "made", "--preset", "vllm") == 0
    assert naiad("add", checkpoint, "second", tmp_path / "made", "--preset", "trtllm") == 0
    made = entries(tmp_path / "made")
    assert sorted(made) == sorted(["llm", "vllm_model", *(f"second_{name}" for name in TRTLLM)])
    assert made["second_tensorrt_llm_bls"].parameters["llm_model_name"] == "second_tensorrt_llm"
    assert [model.name for model in served_models(list(made.values()))] == ["first", "second"]


def test_vllms_shape_is_always_decoupled(
    tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert naiad("create", checkpoint, "x", tmp_path / "made", "--preset", "vllm", "--no-decoupled") == 1
    assert "--preset = 'vllm': expected naiad or trtllm with --no-decoupled" in capsys.readouterr().err
    assert not (tmp_path / "made").exists()


def test_an_installed_package_brings_what_it_writes(tmp_path: Path, checkpoint: Path) -> None:
    """Uses the wheel alone, without the checkout, built without a compiler: its kernels are not needed."""
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "wheels")]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, env={**os.environ, "CXX": "no-compiler"})
    (wheel,) = (tmp_path / "wheels").glob("naiad-*-py3-none-any.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    (metadata,) = (tmp_path / "installed").glob("naiad-*.dist-info/METADATA")
    assert "Requires-Dist: nvidia-pytriton==0.7.0; extra == 'server'" in metadata.read_text()
    for preset in PRESETS:
        words = ["--model", checkpoint, "--name", "first", "--preset", preset, tmp_path / preset]
        done = subprocess.run(
            [sys.executable, "-m", "naiad.cli.main", "repository", "create", *map(str, words)],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(tmp_path / "installed")},
            check=True,
            capture_output=True,
            text=True,
        )
        assert len(done.stdout.splitlines()) == len(PRESETS[preset])
        for name in PRESETS[preset].values():
            assert (tmp_path / preset / name / "config.pbtxt").is_file()
            assert (tmp_path / preset / name / "1").is_dir()
    assert (tmp_path / "installed" / "naiad" / "model_repository" / "llm" / "1" / "model.py").is_file()
