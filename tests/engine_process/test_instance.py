"""Numbers of the instances of one `llm` model, and the locks that keep them."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from naiad.engine_process import Instance, claim_instance, runtime_path
from naiad.engine_process.file_lock import FileLock
from naiad.errors import StartupError

# The random part of an id.
SHIFT = 52


@pytest.fixture
def runtime_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
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


def test_a_lock_has_one_holder_and_leaves_no_file(tmp_path: Path) -> None:
    one, other = FileLock(tmp_path / "lock"), FileLock(tmp_path / "lock")
    assert one.try_take()
    assert one.try_take()
    assert not other.try_take()
    other.release()
    assert not other.try_take()
    one.release()
    assert list(tmp_path.iterdir()) == []
    assert other.try_take()
    other.release()


def test_a_lock_outlives_nobody(tmp_path: Path) -> None:
    script = (
        "import os, sys; from pathlib import Path; from naiad.engine_process.file_lock import FileLock\n"
        "lock = FileLock(Path(sys.argv[1])); assert lock.try_take(); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "lock")], check=True)
    assert (tmp_path / "lock").exists()
    lock = FileLock(tmp_path / "lock")
    assert lock.try_take()
    lock.release()


def test_without_its_directory_there_is_no_lock(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        FileLock(tmp_path / "gone" / "lock").try_take()
