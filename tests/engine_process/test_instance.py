"""Numbers of the instances of one `llm` model, and the locks that keep them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from naiad.engine_process import Instance, claim_instance, runtime_path
from naiad.engine_process.file_lock import FileLock
from naiad.engine_process.instance import claimed_names, engine_names, engine_sockets
from naiad.errors import StartupError

# The random part of an id.
SHIFT = 52


@pytest.fixture
def runtime_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return runtime_path(os.getpid())


def test_ids_name_their_instance_and_fit_in_62_bits() -> None:
    instance = Instance(Path(), "llm", 1023)
    for num_sequences in (1, 128):
        first = instance.draw_first_id(num_sequences)
        assert {(first + i) >> SHIFT for i in range(num_sequences)} == {1023}
        assert 0 < first + num_sequences < 1 << 62
    assert instance.draw_first_id(1) != instance.draw_first_id(1)


def test_a_number_is_taken_once_and_again_when_it_is_given_back(runtime_dir: Path) -> None:
    first, first_lock = claim_instance(os.getpid(), "llm")
    second, second_lock = claim_instance(os.getpid(), "llm")
    other, other_lock = claim_instance(os.getpid(), "other_llm")
    assert [first.number, second.number, other.number] == [0, 1, 0]
    assert len({each.engine_socket for each in (first, second, other)}) == 3
    first_lock.release()
    assert claim_instance(os.getpid(), "llm")[0].number == 0
    second_lock.release()
    other_lock.release()


def test_a_directory_that_was_taken_away_is_made_again(runtime_dir: Path) -> None:
    instance, lock = claim_instance(os.getpid(), "llm")
    lock.release()
    instance.directory.rmdir()
    again, lock = claim_instance(os.getpid(), "llm")
    assert again == instance
    lock.release()


def test_numbers_end(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FileLock, "try_take", lambda _: False)
    with pytest.raises(StartupError, match="llm has 1024 instances"):
        claim_instance(os.getpid(), "llm")


def test_a_directory_that_goes_while_it_is_read_has_no_sockets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`LLMModel.finalize` removes it; `Path.glob` reads a directory that it has just found."""
    monkeypatch.setattr(Path, "is_dir", lambda _: True)
    gone = tmp_path / "gone"
    assert engine_sockets(gone) == []
    assert engine_sockets(gone, "llm") == []
    assert engine_names(gone) == set()
    assert claimed_names(gone) == set()


def test_sockets_and_names_of_a_models_instances(tmp_path: Path) -> None:
    for name in ("llm.0.engine", "llm.0.number", "llm.chat.12.engine", "llm.chat.1.number", "llm.1.metrics"):
        (tmp_path / name).touch()
    assert engine_sockets(tmp_path, "llm") == [tmp_path / "llm.0.engine"]
    assert engine_names(tmp_path) == claimed_names(tmp_path) == {"llm", "llm.chat"}
