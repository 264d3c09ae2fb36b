from __future__ import annotations

from pathlib import Path

import pytest

from naiad.cli.repository.model_entries import (
    ModelEntry,
    find_repository,
    read_repository,
    with_parameters,
)
from naiad.cli.repository.snapshot import RepositorySnapshot
from naiad.errors import StartupError

ENGINE = """
name: "{name}"
backend: "python"
max_batch_size: 8
parameters {{ key: "model_dir" value: {{ string_value: "default" }} }}
parameters {{ key: "max_num_seqs" value: {{ string_value: "32" }} }}
"""
TOKENIZER = 'backend: "python"\nparameters { key: "model_dir" value: { string_value: "default" } }\n'


@pytest.fixture
def source(tmp_path: Path) -> Path:
    root = tmp_path / "source"
    for name, config in {
        "words": TOKENIZER,
        "engine_a": ENGINE.format(name="engine_a"),
        "resnet": 'platform: "onnxruntime_onnx"\n',
    }.items():
        (root / name / "1" / "__pycache__").mkdir(parents=True)
        (root / name / "1" / "model.py").write_text(f"# {name}\n")
        (root / name / "config.pbtxt").write_text(config)
    return root


def parameters(root: Path) -> dict[str, dict[str, str]]:
    return {entry.name: dict(entry.parameters) for entry in read_repository(root)}


def write(source: Path, target: Path, overrides: dict[str, str]) -> None:
    entries = [with_parameters(entry, overrides) for entry in read_repository(source)]
    RepositorySnapshot(source, entries, target)


def by_name(source: Path) -> dict[str, ModelEntry]:
    return {entry.name: entry for entry in read_repository(source)}


def test_models_are_known_by_their_parameters(source: Path) -> None:
    entries = by_name(source)
    assert {name for name, entry in entries.items() if entry.is_ours} == {"words", "engine_a"}
    assert {name for name, entry in entries.items() if entry.is_engine} == {"engine_a"}


def test_options_override_only_parameters_that_a_model_has(source: Path, tmp_path: Path) -> None:
    overrides = {"model_dir": "/models/x", "max_num_seqs": "4"}
    write(source, tmp_path / "target", overrides)
    assert parameters(tmp_path / "target") == {
        "words": {"model_dir": "/models/x"},
        "engine_a": {"model_dir": "/models/x", "max_num_seqs": "4"},
        "resnet": {},
    }


def test_an_engine_takes_settings_that_its_configuration_leaves_out(source: Path, tmp_path: Path) -> None:
    """A repository may be older than the setting, or written by hand."""
    write(source, tmp_path / "target", {"max_num_seqs": "4", "max_model_len": "64", "none_of_ours": "1"})
    assert parameters(tmp_path / "target") == {
        "words": {"model_dir": "default"},
        "engine_a": {"model_dir": "default", "max_num_seqs": "4", "max_model_len": "64"},
        "resnet": {},
    }


def test_what_is_not_overridden_stays(source: Path, tmp_path: Path) -> None:
    write(source, tmp_path / "target", {"model_dir": "/m"})
    before, after = by_name(source)["engine_a"].config, by_name(tmp_path / "target")["engine_a"].config
    assert after.parameters["max_num_seqs"].string_value == "32"
    assert (after.name, after.max_batch_size) == (before.name, 8)


def test_the_source_is_not_changed(source: Path, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in source.rglob("*") if path.is_file()}
    write(source, tmp_path / "target", {"model_dir": "/m"})
    assert {path: path.read_bytes() for path in source.rglob("*") if path.is_file()} == before


def test_all_models_are_copied(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    write(source, target, {})
    assert (target / "engine_a" / "1" / "model.py").read_text() == "# engine_a\n"
    assert not (target / "engine_a" / "1" / "__pycache__").exists()
    assert (target / "resnet" / "1" / "model.py").read_text() == "# resnet\n"


def test_only_the_user_may_read_it(source: Path, tmp_path: Path) -> None:
    write(source, tmp_path / "target", {})
    assert (tmp_path / "target").stat().st_mode & 0o077 == 0


def test_a_config_that_can_not_be_parsed_is_named(source: Path) -> None:
    (source / "words" / "config.pbtxt").write_text("name: {{{")
    with pytest.raises(StartupError, match=r"words/config\.pbtxt can not be parsed"):
        read_repository(source)


def test_a_repository_without_an_engine_is_refused(source: Path) -> None:
    (source / "engine_a" / "config.pbtxt").unlink()
    with pytest.raises(StartupError, match="holds no model of Naiad"):
        read_repository(source)


def test_a_missing_repository_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="--model-repository"):
        find_repository(tmp_path / "nothing")
