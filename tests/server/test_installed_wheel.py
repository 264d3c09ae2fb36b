"""The wheel alone serves: no checkout is near."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from helpers.doc_names import ROOT
from helpers.raw_grpc import ask, text_inputs
from helpers.server import Leaving, start_server
from helpers.tiny_repository import tiny_checkpoint

pytestmark = pytest.mark.slow


def test_a_server_of_the_wheels_files_answers(
    tmp_path: Path, leaving: Leaving, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "wheels")]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = (tmp_path / "wheels").glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    # The environment's packages are those that the extra names; its own Naiad comes later on the path.
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "installed"))
    monkeypatch.chdir(tmp_path)
    server = start_server(tiny_checkpoint(tmp_path / "checkpoint"), "--dtype", "float32")
    try:
        outcome = ask(server.grpc, "ensemble", text_inputs("Hello", 4, ignore_eos=True))
        assert not outcome.errors
        assert outcome.num_finals == 1
        engines = server.processes("naiad.engine_process")
        assert engines
        assert all(os.readlink(f"/proc/{each.pid}/cwd") != str(ROOT) for each in engines)
    finally:
        leaving.take(server)
