"""What killed processes have left is removed at the next start."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from naiad.cli.serve.runtime_folder import region_prefix, runtime_folder

KILLED = """
import os, signal
from pathlib import Path
from naiad.cli.serve.runtime_folder import region_prefix, runtime_folder
with runtime_folder() as folder:
    (folder / "backends").mkdir()
    Path("/dev/shm", region_prefix(folder) + "1").touch()
    print(folder, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(autouse=True)
def temporary_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def killed_folder() -> Path:
    done = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    return Path(done.stdout.strip())


def test_the_next_start_removes_directory_and_regions_of_a_killed_one() -> None:
    left = killed_folder()
    region = Path("/dev/shm", region_prefix(left) + "1")
    assert left.is_dir()
    assert region.exists()
    with runtime_folder():
        assert not left.exists()
        assert not region.exists()


def test_a_directory_in_use_is_left_alone() -> None:
    with runtime_folder() as first:
        region = Path("/dev/shm", region_prefix(first) + "1")
        region.touch()
        with runtime_folder() as second:
            assert first.is_dir()
            assert region.exists()
            assert second != first
        assert not second.exists()
    assert not first.exists()
    assert not region.exists()


def test_other_directories_of_such_names_are_left_alone(temporary_directory: Path) -> None:
    other = temporary_directory / "naiad-serve-notes"
    other.mkdir()
    with runtime_folder():
        assert other.is_dir()
