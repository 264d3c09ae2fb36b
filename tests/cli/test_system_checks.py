from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from naiad.cli import system_checks
from naiad.cli.serve.config_file import tomllib
from naiad.cli.serve.server_files import bundled_server
from naiad.errors import StartupError

CACHE_LINE = "\tlibpython3.11.so.1.0 (libc6,x86-64) => /lib/libpython3.11.so.1.0\n"


@pytest.mark.parametrize(("system", "machine"), [("Darwin", "x86_64"), ("Linux", "aarch64")])
def test_other_platforms_are_refused(system: str, machine: str) -> None:
    with pytest.raises(StartupError, match=f"{system} on {machine}.*container"):
        system_checks.check_platform(system, machine)


@pytest.mark.parametrize(
    ("library", "version"), [("glibc", "2.34"), ("glibc", "2.9"), ("", ""), ("musl", "9.9")]
)
def test_an_old_or_foreign_c_library_is_refused(library: str, version: str) -> None:
    with pytest.raises(StartupError, match=r"glibc 2\.35"):
        system_checks.check_glibc(library, version)


@pytest.mark.parametrize("version", ["2.35", "2.41", "3.0"])
def test_a_new_glibc_passes(version: str) -> None:
    system_checks.check_glibc("glibc", version)


@pytest.mark.parametrize("version", [(3, 9), (3, 13), (2, 7)])
def test_unsupported_python_is_refused_with_the_supported_ones(version: tuple[int, int]) -> None:
    with pytest.raises(StartupError, match=r"3\.10, 3\.11"):
        system_checks.check_python(version)


@pytest.mark.parametrize("version", [None, "2.0.1", "2.4.6"])
def test_wrong_numpy_is_refused_with_the_command_that_repairs_it(version: str | None) -> None:
    with pytest.raises(StartupError, match='pip install "numpy<2"'):
        system_checks.check_numpy(version)


def test_numpy_1_passes() -> None:
    system_checks.check_numpy("1.26.4")


def test_too_little_room_names_the_place_and_the_remedy(tmp_path: Path) -> None:
    needed = shutil.disk_usage(tmp_path).total * 2
    with pytest.raises(StartupError, match=f"{tmp_path} has .* the thing needs .*: buy a disk"):
        system_checks.check_space(tmp_path / "not" / "yet", needed, "the thing", "buy a disk")


def test_enough_room_passes(tmp_path: Path) -> None:
    system_checks.check_space(tmp_path, 1, "the thing", "buy a disk")


def test_too_little_memory_is_refused() -> None:
    with pytest.raises(StartupError, match=r"1\.0 GiB of memory are available.* 3\.0 GiB"):
        system_checks.check_memory(1 << 30, 3 << 30)


def test_libpython_beside_the_interpreter_is_found(tmp_path: Path) -> None:
    (tmp_path / "libpython3.11.so.1.0").touch()
    assert system_checks.libpython_directory((3, 11), str(tmp_path), {}, "") == str(tmp_path)


def test_libpython_that_the_loader_knows_needs_no_directory(tmp_path: Path) -> None:
    assert system_checks.libpython_directory((3, 11), str(tmp_path), {}, CACHE_LINE) is None


def test_libpython_on_the_library_path_needs_no_directory(tmp_path: Path) -> None:
    (tmp_path / "libpython3.11.so.1.0").touch()
    environment = {"LD_LIBRARY_PATH": f"/nowhere:{tmp_path}"}
    assert system_checks.libpython_directory((3, 11), None, environment, "") is None


def test_missing_libpython_names_the_package(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"libpython3\.12\.so\.1\.0 is missing.*package libpython3\.12"):
        system_checks.libpython_directory((3, 12), str(tmp_path), {}, CACHE_LINE)


def test_this_machine_passes() -> None:
    system_checks.check_machine()


def test_the_extra_installs_what_the_checks_ask_for() -> None:
    """`pip install "./naiad-….whl[server]"` is what the refusals of a bare installation name."""
    root = Path(__file__).parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    lines = (root / "requirements" / "server.txt").read_text().splitlines()
    (server,) = [line.split()[0] for line in lines if line.startswith("nvidia-pytriton")]
    assert project["optional-dependencies"]["server"] == [server, "numpy<2"]
    with pytest.raises(StartupError, match=r"naiad-….whl\[server\]"):
        system_checks.check_numpy("2.1.0")
    with pytest.raises(StartupError, match=r"naiad-….whl\[server\]"):
        bundled_server(None, (3, 11), Path("unused"))


def test_the_oldest_psutil_allowed_has_what_naiad_calls() -> None:
    """`Process.net_connections` came with 6.0.0."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    (asked,) = [each for each in map(Requirement, project["dependencies"]) if each.name == "psutil"]
    assert not asked.specifier.contains("5.9.8")
    assert asked.specifier.contains("6.0.0")
