from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from naiad.engine_process import remove_runtime_directory, runtime_directory
from naiad.engine_process.runtime_dir import runtime_directories_below
from naiad.errors import StartupError


@pytest.fixture(autouse=True)
def temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_directory_is_private() -> None:
    path = runtime_directory(os.getpid())
    assert stat.S_IMODE(path.lstat().st_mode) == 0o700


def test_every_process_of_a_server_gets_the_same_directory() -> None:
    code = "import sys; from naiad.engine_process import runtime_directory\n"
    code += "print(runtime_directory(int(sys.argv[1])))"
    path = runtime_directory(os.getpid())
    arguments = [sys.executable, "-c", code, str(os.getpid())]
    other = subprocess.run(arguments, capture_output=True, text=True, check=True).stdout.strip()
    assert Path(other) == path


def test_servers_have_directories_of_their_own() -> None:
    assert runtime_directory(os.getpid()) != runtime_directory(os.getppid())


def test_directory_open_to_others_is_refused() -> None:
    path = runtime_directory(os.getpid())
    path.chmod(0o755)
    with pytest.raises(StartupError, match="not a private directory"):
        runtime_directory(os.getpid())


def test_symlink_is_refused(tmp_path: Path) -> None:
    path = runtime_directory(os.getpid())
    path.rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StartupError, match="not a private directory"):
        runtime_directory(os.getpid())


def test_temporary_directory_that_is_full_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(StartupError, match="set TMPDIR"):
        runtime_directory(os.getpid())


def test_dead_servers_directory_is_removed(dead_pid: int) -> None:
    dead = runtime_directory(dead_pid)
    dead.mkdir(mode=0o700, exist_ok=True)
    (dead / "llm.engine").touch()
    runtime_directory(os.getpid())
    assert not dead.exists()


def test_living_servers_directory_stays() -> None:
    living = runtime_directory(os.getppid())
    runtime_directory(os.getpid())
    assert living.exists()


def test_removal_takes_the_sockets_along() -> None:
    path = runtime_directory(os.getpid())
    (path / "llm.engine").touch()
    remove_runtime_directory(path)
    assert not path.exists()


def test_removal_of_what_is_gone_is_fine() -> None:
    path = runtime_directory(os.getpid())
    remove_runtime_directory(path)
    remove_runtime_directory(path)
    assert not path.exists()


def test_servers_below_a_process_are_found() -> None:
    path = runtime_directory(os.getpid())
    assert runtime_directories_below(os.getpid()) == [path]
    assert runtime_directories_below(os.getppid()) == [path]


def test_a_dead_server_is_below_nobody(dead_pid: int) -> None:
    runtime_directory(dead_pid)
    assert runtime_directories_below(dead_pid) == []


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o777])
def test_a_directory_that_others_could_have_made_is_not_a_servers(mode: int) -> None:
    path = runtime_directory(os.getpid())
    path.chmod(mode)
    assert runtime_directories_below(os.getpid()) == []


def test_a_link_is_no_servers_directory(tmp_path: Path) -> None:
    path = runtime_directory(os.getpid())
    path.rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    path.symlink_to(tmp_path / "elsewhere")
    assert runtime_directories_below(os.getpid()) == []


@pytest.mark.parametrize("number", ["²", "٣", "", "-1", "1.5", "9" * 200])
def test_names_that_hold_no_process_id_are_passed_over(number: str) -> None:
    path = runtime_directory(os.getpid())
    path.with_name(path.name.removesuffix(str(os.getpid())) + number).mkdir(mode=0o700)
    assert runtime_directories_below(os.getpid()) == [path]
