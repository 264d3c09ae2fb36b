"""Is this machine one that a server can start on? Each check names the cause and the remedy."""

from __future__ import annotations

import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

from naiad.errors import StartupError

SUPPORTED_PYTHONS = ((3, 10), (3, 11), (3, 12), (3, 13))
MIN_GLIBC = (2, 35)
MIN_SHM_BYTES = 64 << 20
MIN_TEMP_BYTES = 64 << 20
_MIB = 1 << 20
_GIB = 1 << 30


def check_platform(system: str, machine: str) -> None:
    """Linux on x86-64, as `platform.system()` and `platform.machine()` name them.

    Raises:
        StartupError: another system or processor.
    """
    if (system, machine) != ("Linux", "x86_64"):
        raise StartupError(
            f"this is {system} on {machine}: the server exists for Linux on x86-64 only; "
            "use such a machine, or a container of that platform"
        )


def check_glibc(library: str, version: str) -> None:
    """Glibc ≥ 2.35, as `platform.libc_ver()` tells it.

    Raises:
        StartupError: another C library, or too old.
    """
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if library != "glibc" or numbers < MIN_GLIBC:
        found = f"{library or 'an unknown C library'} {version}".strip()
        raise StartupError(
            f"the C library is {found}: the server needs glibc 2.35 or newer; "
            "use Debian 12, Ubuntu 22.04 or newer, or the container"
        )


def check_python(version: tuple[int, int], supported: Sequence[tuple[int, int]] = SUPPORTED_PYTHONS) -> None:
    """A Python the server has a stub for.

    Raises:
        StartupError: another version.
    """
    if version not in supported:
        names = ", ".join(f"{major}.{minor}" for major, minor in supported)
        raise StartupError(
            f"Python {version[0]}.{version[1]} is not supported: make the environment with one of {names}"
        )


def check_numpy(version: str | None) -> None:
    """A numpy of the 1.x series: the server's stub dies of the first string tensor with 2.x.

    Raises:
        StartupError: absent, or 2.x.
    """
    if version is None:
        raise StartupError('numpy is not installed: run `pip install "numpy<2"`')
    if int(version.split(".")[0]) >= 2:
        raise StartupError(
            f'numpy {version} does not work with the server: run `pip install "numpy<2"` in its environment'
        )


def check_space(path: Path, needed_bytes: int, purpose: str, remedy: str) -> None:
    """Enough free bytes where `path` is (or will be).

    Raises:
        StartupError: too few; says for what and what to do.
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
    """Enough memory for the weights, the KV caches' minimum and the Python processes.

    Args:
        available_bytes: of the machine.
        needed_bytes: of it.
        whose: subject and verb of the message.

    Raises:
        StartupError: too little.
    """
    if available_bytes < needed_bytes:
        raise StartupError(
            f"{available_bytes / _GIB:.1f} GiB of memory are available, {whose} "
            f"{needed_bytes / _GIB:.1f} GiB: stop other programs, take a smaller model, "
            "or raise the container's memory limit"
        )


def available_memory_bytes(
    meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")
) -> int:
    """What may still be allocated: the machine's available memory, or the container's rest."""
    match = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo.read_text(), re.MULTILINE)
    available = int(match[1]) * 1024 if match else 0
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
    except (OSError, ValueError):
        return available
    return min(available, int(limit) - used) if limit.isdigit() else available


def libpython_directory(
    version: tuple[int, int], library_dir: str | None, environment: Mapping[str, str], loader_cache: str
) -> str | None:
    """Where the server's stub finds libpython.

    Args:
        version: of this Python.
        library_dir: `sysconfig.get_config_var("LIBDIR")`.
        environment: for LD_LIBRARY_PATH.
        loader_cache: what `ldconfig -p` prints.

    Returns:
        A directory to add to LD_LIBRARY_PATH, or None when the loader finds it by itself.

    Raises:
        StartupError: it is nowhere.
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


def check_port(option: str, host: str, port: int) -> None:
    """Nobody listens there yet, and this machine has that address.

    Raises:
        StartupError: in use, not allowed, or no such address.
    """
    try:
        with _listening_socket(host, port):
            return
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
    raise StartupError(
        f"{option} {port} on {host} can not be used ({reason}): "
        "stop what listens there, or choose another port"
    )


def free_port(host: str) -> int:
    """A port that nobody uses now.

    Raises:
        StartupError: the host is no address of this machine.
    """
    try:
        with _listening_socket(host, 0) as listener:
            return int(listener.getsockname()[1])
    except OSError as error:
        raise StartupError(
            f"--host {host} is no address of this machine ({error.strerror}): use 127.0.0.1"
        ) from None


def check_machine() -> str | None:
    """All checks that do not depend on options but libpython's place, in the order of likely causes.

    Returns:
        The directory to add to LD_LIBRARY_PATH for libpython, or None.

    Raises:
        StartupError: the first that fails.
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


def _listening_socket(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        # As servers do: connections in TIME_WAIT do not hinder.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()
    except BaseException:
        listener.close()
        raise
    return listener


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
