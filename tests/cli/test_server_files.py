from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from naiad.cli.serve.server_files import bundled_server, installed_server, server_environment
from naiad.errors import StartupError


@pytest.fixture
def package(tmp_path: Path) -> Path:
    root = tmp_path / "pytriton" / "tritonserver"
    for name in (
        "bin/tritonserver",
        "python_backend_stubs/3.11/triton_python_backend_stub",
        "backends/python/libtriton_python.so",
        "backends/python/triton_python_backend_stub",
    ):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
        path.chmod(0o644)
    return tmp_path / "pytriton"


def test_the_backend_directory_has_the_stub_of_this_python(package: Path, tmp_path: Path) -> None:
    files = bundled_server(package, (3, 11), tmp_path / "backends")
    assert files.backend_directory is not None
    stub = files.backend_directory / "python" / "triton_python_backend_stub"
    assert stub.read_text() == "python_backend_stubs/3.11/triton_python_backend_stub"
    assert (files.backend_directory / "python" / "libtriton_python.so").exists()


def test_server_and_stub_can_be_run_afterwards(package: Path, tmp_path: Path) -> None:
    files = bundled_server(package, (3, 11), tmp_path / "backends")
    assert os.access(files.program, os.X_OK)
    assert os.access(tmp_path / "backends" / "python" / "triton_python_backend_stub", os.X_OK)


def test_the_package_keeps_its_files(package: Path, tmp_path: Path) -> None:
    before = {path: path.read_text() for path in package.rglob("*") if path.is_file()}
    bundled_server(package, (3, 11), tmp_path / "backends")
    assert {path: path.read_text() for path in package.rglob("*") if path.is_file()} == before


def test_no_package_names_the_command_that_installs_it(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"pip install --no-deps nvidia-pytriton.*--tritonserver"):
        bundled_server(None, (3, 11), tmp_path / "backends")


def test_a_missing_stub_names_the_python(package: Path, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"3\.13/triton_python_backend_stub is missing.*Python 3\.13"):
        bundled_server(package, (3, 13), tmp_path / "backends")


def test_an_installed_server_must_be_a_program(package: Path) -> None:
    with pytest.raises(StartupError, match=r"--tritonserver .*executable"):
        installed_server(package / "tritonserver" / "bin" / "tritonserver")


def test_the_servers_python_is_ours_and_comes_first() -> None:
    environment = server_environment({"PATH": "/usr/bin", "HOME": "/h", "MALLOC_ARENA_MAX": "7"}, None)
    path = f"{Path(sys.executable).parent}:/usr/bin"
    assert environment == {"PATH": path, "HOME": "/h", "MALLOC_ARENA_MAX": "7"}


@pytest.mark.parametrize(("num_cores", "num_arenas"), [(1, "2"), (2, "2"), (64, "64")])
def test_the_server_takes_memory_from_an_arena_for_each_core(
    num_cores: int, num_arenas: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(num_cores)))
    assert server_environment({}, None)["MALLOC_ARENA_MAX"] == num_arenas


@pytest.mark.parametrize(("before", "after"), [("/old", "/new:/old"), ("", "/new")])
def test_libpython_is_put_on_the_library_path(before: str, after: str) -> None:
    # An empty element would mean the working directory.
    assert server_environment({"LD_LIBRARY_PATH": before}, "/new")["LD_LIBRARY_PATH"] == after
