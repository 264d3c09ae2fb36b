from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from shutil import which
from typing import Any

import pytest

from helpers.small_kernels import use_small_kernels
from naiad.cli.doctor import command, kernels, processor
from naiad.cli.main import main
from naiad.config.cores import num_compute_threads
from naiad_kernels.native import build
from naiad_kernels.native.cache import LibraryCache
from naiad_kernels.native.variants import PORTABLE, PORTABLE_AMX, cpu_flags


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


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of the cache of a machine whose kernels compile at once."""
    if not any(map(which, (os.environ.get("CXX", "g++"), "g++", "clang++", "c++"))):
        pytest.skip("no C++ compiler is installed")
    use_small_kernels(monkeypatch, tmp_path)
    monkeypatch.setattr(kernels, "usable_variants", lambda: iter([PORTABLE]))
    return tmp_path


def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")


def no_cache(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    (folder / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "file"))


def prebuild() -> Path:
    """Put the library where a wheel has it."""
    flags = (*build.COMPILE_FLAGS, *PORTABLE.compile_flags)
    build.PREBUILT_DIR.mkdir()
    library = build.PREBUILT_DIR / f"{build.library_name(PORTABLE, flags)}.so"
    build.compile_library([*build.compiler(), *flags], library)
    return library


def kernels_of(found: dict[str, Any]) -> tuple[str, str]:
    return found["kernels"], found["kernel_library"]


def test_a_missing_compiler_is_advice_and_no_fault(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, small: Path
) -> None:
    code, before = examined(capsys)
    no_compiler(monkeypatch)
    without, found = examined(capsys)
    assert without == code
    assert (found["compiler"], *kernels_of(found)) == ("", "torch", "")
    (line,) = (line for line in found["advice"] if "compute" in line)
    assert line.startswith("torch computes the steps: no C++ compiler is installed (looked for no-such-")
    assert line.endswith(": install g++ or clang++")
    assert found["faults"] == before["faults"]


def test_kernels_that_a_wheel_brings_need_neither_a_compiler_nor_a_cache(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, small: Path
) -> None:
    prebuild()
    no_compiler(monkeypatch)
    no_cache(monkeypatch, small)
    _, found = examined(capsys)
    assert (found["compiler"], *kernels_of(found)) == ("", "native portable", "prebuilt")
    assert not [line for line in found["advice"] if "g++" in line or "start" in line]


def test_prebuilt_kernels_are_told_before_cached_ones(small: Path) -> None:
    build.load(PORTABLE)
    prebuild()
    assert kernels.find_kernels()[0]["kernel_library"] == "prebuilt"


def test_prebuilt_kernels_of_other_sources_are_not_told(monkeypatch: pytest.MonkeyPatch, small: Path) -> None:
    prebuild()
    (build.SOURCE_DIR / "one.h").write_text("// more\n")
    no_compiler(monkeypatch)
    assert kernels.find_kernels()[0] == {"kernels": "torch", "kernel_library": ""}


def test_prebuilt_kernels_that_cannot_be_loaded_leave_the_steps_to_torch(small: Path) -> None:
    prebuild().write_bytes(b"of another machine")
    found, (line,) = kernels.find_kernels()
    assert found == {"kernels": "torch", "kernel_library": ""}
    assert line.startswith("torch computes the steps: the native kernels cannot be compiled or loaded: ")
    with pytest.raises(build.BuildError):
        build.load(PORTABLE)


@pytest.mark.parametrize("has_compiler", [True, False])
def test_cached_kernels_are_told_with_and_without_a_compiler(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, small: Path, has_compiler: bool
) -> None:
    build.load(PORTABLE)
    if not has_compiler:
        no_compiler(monkeypatch)
    _, found = examined(capsys)
    assert kernels_of(found) == ("native portable", "cached")
    assert not [line for line in found["advice"] if "g++" in line or "start" in line]


def test_a_cache_that_cannot_be_written_is_no_matter_if_it_has_the_kernels(
    monkeypatch: pytest.MonkeyPatch, small: Path
) -> None:
    build.load(PORTABLE)
    monkeypatch.setattr(LibraryCache, "_can_lock", lambda _: False)
    assert kernels.find_kernels() == ({"kernels": "native portable", "kernel_library": "cached"}, [])


def test_kernels_that_have_yet_to_be_compiled_are_told_and_not_compiled(
    capsys: pytest.CaptureFixture[str], small: Path
) -> None:
    _, found = examined(capsys)
    assert kernels_of(found) == ("native portable", "compiled at the first start")
    assert not [line for line in found["advice"] if "start" in line]
    assert not list(small.glob("cache/**/*.so"))
    assert main(["doctor"]) in (0, 1)
    assert "compiled at the first start\n" in capsys.readouterr().out


def test_kernels_that_cannot_be_kept_are_compiled_at_every_start(
    monkeypatch: pytest.MonkeyPatch, small: Path
) -> None:
    no_cache(monkeypatch, small)
    found, (line,) = kernels.find_kernels()
    assert found == {"kernels": "native portable", "kernel_library": "compiled at every start"}
    assert "kernels are compiled at every start; set XDG_CACHE_HOME" in line


def test_a_slower_variant_that_is_there_is_told(monkeypatch: pytest.MonkeyPatch, small: Path) -> None:
    build.load(PORTABLE)
    no_compiler(monkeypatch)
    monkeypatch.setattr(kernels, "usable_variants", lambda: iter([PORTABLE_AMX, PORTABLE]))
    found, (line,) = kernels.find_kernels()
    assert found == {"kernels": "native portable", "kernel_library": "cached"}
    assert line.startswith("portable kernels compute the steps, not the fastest ones: no C++ compiler")


def test_a_compiler_is_no_remedy_for_a_cpu_without_avx2(monkeypatch: pytest.MonkeyPatch) -> None:
    no_compiler(monkeypatch)
    monkeypatch.setattr(kernels, "usable_variants", lambda: iter([]))
    found, (line,) = kernels.find_kernels()
    assert found == {"kernels": "torch", "kernel_library": ""}
    assert line.startswith("torch computes the steps: this CPU (")
    assert line.endswith(") has no AVX2")


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
