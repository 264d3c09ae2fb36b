from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from naiad.cli.doctor import command, processor
from naiad.cli.main import main
from naiad.config.cores import num_compute_threads
from naiad_kernels.native.variants import cpu_flags


@pytest.fixture(autouse=True)
def _small_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "_READ_BYTES", 1 << 20)
    monkeypatch.setattr(processor, "_READ_S", 0.01)
    monkeypatch.setattr(processor.torch, "set_num_threads", lambda _: None)


def examined(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, dict[str, Any]]:
    code = main(["doctor", "--json", *options])
    return code, json.loads(capsys.readouterr().out)


def test_json_and_text_say_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = examined(capsys)
    assert code == bool(found["faults"])
    assert set(found["instruction_sets"]) <= cpu_flags()
    assert found["threads"] == num_compute_threads()
    assert found["read_gb_per_s"] > 0
    assert main(["doctor"]) == code
    text = capsys.readouterr().out
    assert f"{found['kernels']}\n" in text
    assert f"{found['dtype']}\n" in text


def test_a_machine_without_a_moment_for_it_is_measured_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "_READ_S", 0.0)
    assert 0 < processor.read_bandwidth(1) < float("inf")


def test_a_missing_compiler_is_advice_and_no_fault(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, before = examined(capsys)
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert examined(capsys)[0] == code
    _, found = examined(capsys)
    assert (found["compiler"], found["kernels"]) == ("", "torch")
    assert any("no-such-compiler" in line and "install g++" in line for line in found["advice"])
    assert found["faults"] == before["faults"]


def test_a_missing_server_is_a_fault(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, found = examined(capsys, "--tritonserver", str(tmp_path / "nothing"))
    assert code == 1
    assert any("expected the path of an executable tritonserver" in line for line in found["faults"])


def test_each_fault_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(command, "package_directory", lambda: None)
    monkeypatch.setattr(command, "running_python", lambda: (2, 7))
    assert any("no tritonserver" in line for line in command.find_faults(None))


def test_amx_that_is_denied_is_advice(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("naiad_kernels.native.variants.cpu_flags", lambda: frozenset({"amx_tile"}))
    monkeypatch.setattr("naiad_kernels.native.variants.grants_amx", lambda: False)
    _, found = examined(capsys)
    assert found["amx_granted"] is False
    assert any("seccomp" in line for line in found["advice"])


def test_too_few_descriptors_are_told_in_a_line() -> None:
    code = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (8, 8))\n"
    code += "import sys; from naiad.cli.main import main; sys.exit(main(['doctor']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("naiad: error: ")
    assert done.stderr.count("\n") == 1
