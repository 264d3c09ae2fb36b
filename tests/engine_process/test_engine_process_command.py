from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from naiad.config import EngineConfig
from naiad.engine_process.__main__ import parse
from naiad.engine_process.clients.engine_child import child_environment, config_options, default_command

REQUIRED = ["--socket", "/s", "--parent-pid", "7"]


def test_configuration_survives_the_command_line() -> None:
    config = EngineConfig(
        model_dir="-- a model",
        dtype="float32",
        device="cuda",
        max_num_seqs=3,
        max_num_batched_tokens=5,
        max_model_len=11,
        block_size=16,
        kv_cache_bytes=2**40,
    )
    assert parse([*REQUIRED, *config_options(config)]) == (config, Path("/s"), 7)


def test_defaults_survive_the_command_line() -> None:
    config = EngineConfig(model_dir="m")
    assert parse([*REQUIRED, *config_options(config)])[0] == config


def test_bad_value_ends_the_process_with_its_name() -> None:
    arguments = [*default_command(), *REQUIRED, "--model-dir=m", "--block-size=7"]
    result = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "block_size = 7: expected 16, 32, 64 or 128" in result.stderr
    assert "Traceback" not in result.stderr


def test_command_is_the_module_by_this_python() -> None:
    assert default_command() == [sys.executable, "-m", "naiad.engine_process"]


def test_interpreter_without_a_name_is_found_by_its_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "")
    assert default_command()[0] == f"{sys.prefix}/bin/python3"


def test_environment_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_VARIABLE", "value")
    assert child_environment()["SOME_VARIABLE"] == "value"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no safe path")
def test_working_directory_is_not_imported_from(tmp_path: Path) -> None:
    (tmp_path / "msgspec.py").write_text("raise SystemExit('imported from the working directory')")
    arguments = [*default_command(), *REQUIRED, "--model-dir=m", "--block-size=7"]
    result = subprocess.run(
        arguments, capture_output=True, text=True, check=False, cwd=tmp_path, env=child_environment()
    )
    assert result.returncode == 2
    assert "block_size" in result.stderr


def test_the_users_environment_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONSAFEPATH", "")
    assert child_environment()["PYTHONSAFEPATH"] == os.environ["PYTHONSAFEPATH"]
