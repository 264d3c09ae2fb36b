"""The wheel alone serves: no checkout is near."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from helpers.doc_names import ROOT
from helpers.raw_grpc import ask, text_inputs
from helpers.server import Leaving, Server, start_repository, start_server
from helpers.tiny_repository import tiny_checkpoint
from naiad.cli.system_checks import SUPPORTED_PYTHONS

pytestmark = pytest.mark.slow

_PIP = ("-m", "pip", "--disable-pip-version-check", "-q")
# `make test-all PIP_ARGS="--extra-index-url URL"` names an index with the small CPU build of torch.
_PIP_ARGS = shlex.split(os.environ.get("PIP_ARGS", ""))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheels")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (made,) = folder.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skips a test if pip finds no packages."""
    folder = tmp_path_factory.mktemp("downloads")
    asked = [sys.executable, *_PIP, "download", "--no-deps", "--retries", "1", *_PIP_ARGS, "hpack"]
    found = subprocess.run(asked, cwd=folder, capture_output=True, text=True, check=False)
    if found.returncode:
        pytest.skip(f"pip reaches no package index: {found.stderr.strip().rpartition(chr(10))[2]}")


def answers(server: Server) -> bool:
    outcome = ask(server.grpc, "ensemble", text_inputs("Hello", 4, ignore_eos=True))
    return not outcome.errors and outcome.num_finals == 1


def test_a_server_of_the_wheels_files_answers(
    wheel: Path, tmp_path: Path, leaving: Leaving, monkeypatch: pytest.MonkeyPatch
) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    # The environment's packages are those that the extra names; its own Naiad comes later on the path.
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "installed"))
    monkeypatch.chdir(tmp_path)
    server = start_server(tiny_checkpoint(tmp_path / "checkpoint"), "--dtype", "float32")
    try:
        assert answers(server)
        engines = server.processes("naiad.engine_process")
        assert engines
        assert all(os.readlink(f"/proc/{each.pid}/cwd") != str(ROOT) for each in engines)
    finally:
        leaving.take(server)


def interpreter(version: tuple[int, int]) -> str:
    """A Python of this version; skips a test if the machine has none."""
    if version == sys.version_info[:2]:
        return sys.executable
    name = f"python{version[0]}.{version[1]}"
    # Of several that are installed the search may find one that only says that it is not chosen.
    if subprocess.run(["/usr/bin/env", name, "-c", ""], capture_output=True, check=False).returncode:
        pytest.skip(f"this machine has no {name}")
    return name


@pytest.mark.parametrize("version", SUPPORTED_PYTHONS, ids=str)
def test_one_command_installs_a_server_that_answers(
    index: None, wheel: Path, version: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an environment of its own; torch is the release of requirements/torch.txt, so that it is known."""
    program = interpreter(version)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(tmp_path)
    subprocess.run([program, "-m", "venv", "fresh"], check=True)
    python = tmp_path / "fresh" / "bin" / "python"
    pinned = ("-c", str(ROOT / "requirements" / "torch.txt"))
    subprocess.run([python, *_PIP, "install", *_PIP_ARGS, *pinned, f"{wheel}[server]"], check=True)
    subprocess.run([python, *_PIP, "check"], check=True)
    options = ("--model", str(tiny_checkpoint(tmp_path / "checkpoint")), "--dtype", "float32")
    server = start_repository(*options, program=[str(python.with_name("naiad"))])
    try:
        assert answers(server)
        maps = [Path(f"/proc/{each.pid}/maps").read_text("utf-8") for each in server.processes("naiad")]
        assert maps
        # Nothing of the checkout, nor of this environment.
        assert not any(f" {place}/" in text for text in maps for place in (ROOT, sys.prefix))
    finally:
        assert server.stop() == 0, server.lines[-40:]
