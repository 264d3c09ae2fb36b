"""What the process that guards the server's directory clears away."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from helpers.server import eventually
from naiad.cli.serve import server_guard
from naiad.cli.serve.server_guard import Guard
from naiad.engine_process import runtime_path


def test_sockets_of_a_dead_server_with_the_same_process_id_are_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prepare = server_guard._prepare

    def prepare_one_with_a_used_id() -> None:
        directory = runtime_path(os.getpid())
        directory.mkdir(mode=0o700)
        (directory / "gone.0.engine").touch()
        prepare()

    monkeypatch.setattr(server_guard, "_prepare", prepare_one_with_a_used_id)
    guard = Guard(["sleep", "60"])
    directory = runtime_path(guard._server.pid)
    try:
        assert not directory.exists()
    finally:
        assert guard.finish() != 0
    assert not directory.exists()


@pytest.fixture
def first_process() -> Iterator[None]:
    """Lets this process take in orphans as the first process of a container does, and wait for none."""
    prctl = ctypes.CDLL(None).prctl
    prctl(server_guard._PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    yield
    prctl(server_guard._PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def run_guard(tmp_path: Path, script: str) -> subprocess.Popen[bytes]:
    """Guard a server that is this script of a shell."""
    command = [sys.executable, "-m", "naiad.cli.serve.server_guard", "--remove", str(tmp_path / "nothing")]
    return subprocess.Popen([*command, "--", "bash", "-c", script], stdin=subprocess.PIPE)


@pytest.mark.usefixtures("first_process")
def test_nothing_is_left_of_processes_that_outlive_the_server(tmp_path: Path) -> None:
    child = tmp_path / "child"
    guard = run_guard(tmp_path, f"sleep 600 & echo $! > '{child}'; exit 7")
    # The server's own exit code is not lost among those of the others.
    assert guard.wait(30) == 7
    assert not psutil.pid_exists(int(child.read_text()))


@pytest.mark.usefixtures("first_process")
def test_nothing_is_left_of_processes_whose_parent_ends_while_the_server_runs(tmp_path: Path) -> None:
    child = tmp_path / "child"
    guard = run_guard(tmp_path, f"(sleep 0.2 & echo $! > '{child}'); exec sleep 600")
    try:
        eventually(lambda: child.exists() and child.read_text().endswith("\n"))
        eventually(lambda: not psutil.pid_exists(int(child.read_text())))
        assert guard.poll() is None
    finally:
        assert guard.stdin is not None
        guard.stdin.close()
        assert guard.wait(30) == 128 + 9
