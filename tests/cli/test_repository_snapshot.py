"""The snapshot of the repository that a server gets."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from naiad.cli.repository.model_entries import read_repository, with_parameters
from naiad.cli.repository.snapshot import RepositorySnapshot
from naiad.errors import StartupError

ENGINE = """
name: "llm"
backend: "python"
parameters { key: "model_dir" value: { string_value: "default" } }
parameters { key: "max_num_seqs" value: { string_value: "32" } }
"""
LARGE = 2 << 20
Make = Callable[[], RepositorySnapshot]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    root = tmp_path / "source"
    for name, config in {"llm": ENGINE, "resnet": 'platform: "onnxruntime_onnx"\n'}.items():
        (root / name / "1").mkdir(parents=True)
        (root / name / "config.pbtxt").write_text(config)
    (root / "llm" / "1" / "model.py").write_text("# one\n")
    (root / "resnet" / "1" / "labels.txt").write_text("cat\n")
    (root / "resnet" / "1" / "model.onnx").write_bytes(b"1" * LARGE)
    return root


@pytest.fixture
def make(source: Path, tmp_path: Path) -> Make:
    entries = [with_parameters(entry, {"max_num_seqs": "4"}) for entry in read_repository(source)]
    return lambda: RepositorySnapshot(source, entries, tmp_path / "snapshot")


@pytest.fixture
def no_hard_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """As between two file systems."""

    def refuse(*_: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)


def test_edits_of_the_repository_do_not_reach_it(source: Path, make: Make) -> None:
    snapshot = make()
    (source / "llm" / "1" / "model.py").write_text("# two\n")
    (source / "resnet" / "1" / "labels.txt").write_text("dog\n")
    (source / "resnet" / "2").mkdir()
    replacement = source / "resnet" / "1" / "new"
    replacement.write_bytes(b"2" * LARGE)
    replacement.rename(source / "resnet" / "1" / "model.onnx")
    seen = snapshot.directory
    assert (seen / "llm" / "1" / "model.py").read_text() == "# one\n"
    assert (seen / "resnet" / "1" / "labels.txt").read_text() == "cat\n"
    assert (seen / "resnet" / "1" / "model.onnx").read_bytes() == b"1" * LARGE
    assert not (seen / "resnet" / "2").exists()
    assert snapshot.changes() == []


def test_it_has_the_parameters_and_the_repository_keeps_its_own(source: Path, make: Make) -> None:
    snapshot = make()
    (engine,) = [entry for entry in read_repository(snapshot.directory) if entry.is_engine]
    assert engine.parameters["max_num_seqs"] == "4"
    assert 'string_value: "32"' in (source / "llm" / "config.pbtxt").read_text()


def test_a_moved_repository_does_not_matter_where_hard_links_are_possible(source: Path, make: Make) -> None:
    snapshot = make()
    source.rename(source.parent / "elsewhere")
    assert snapshot.changes() == []
    assert (snapshot.directory / "resnet" / "1" / "model.onnx").stat().st_size == LARGE


def test_a_large_file_that_is_written_into_is_told_once(source: Path, make: Make) -> None:
    snapshot = make()
    with (source / "resnet" / "1" / "model.onnx").open("ab") as file:
        file.write(b"3")
    (line,) = snapshot.changes()
    assert "model.onnx has changed since the start" in line
    assert snapshot.changes() == []


@pytest.mark.usefixtures("no_hard_links")
def test_a_large_file_on_another_file_system_that_is_replaced_is_told(source: Path, make: Make) -> None:
    snapshot = make()
    replacement = source / "new"
    replacement.write_bytes(b"2" * LARGE)
    replacement.rename(source / "resnet" / "1" / "model.onnx")
    (line,) = snapshot.changes()
    assert str(source / "resnet" / "1" / "model.onnx") in line


@pytest.mark.usefixtures("no_hard_links")
def test_a_moved_repository_on_another_file_system_is_told(source: Path, make: Make) -> None:
    snapshot = make()
    source.rename(source.parent / "elsewhere")
    with pytest.raises(StartupError, match=r"model\.onnx is gone since the start .*put the repository back"):
        snapshot.changes()


def test_a_repository_that_can_not_be_read_whole_is_refused_with_the_file(source: Path, make: Make) -> None:
    (source / "resnet" / "1" / "missing").symlink_to(source / "nowhere")
    with pytest.raises(StartupError, match=r"the repository can not be copied: .*missing.*No such file"):
        make()
