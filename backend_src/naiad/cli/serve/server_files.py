"""The tritonserver binary, its backends directory and its environment."""

from __future__ import annotations

import importlib.util
import os
import stat
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from naiad.cli.system_checks import WITH_SERVER
from naiad.errors import StartupError

# The Python backend's program that runs one model.
STUB_NAME = "triton_python_backend_stub"
# Of the C library, on a machine with one core.
_LEAST_ARENAS = 2


@dataclass(frozen=True, slots=True)
class ServerFiles:
    """The files of a server.

    Attributes:
        program: the tritonserver binary.
        backend_directory: value of --backend-directory; None: the server's default.
        is_bundled: whether it is the server in the package nvidia-pytriton.
    """

    program: Path
    backend_directory: Path | None
    is_bundled: bool


def installed_server(program: Path) -> ServerFiles:
    """The installed server that `--tritonserver` names.

    Raises:
        StartupError: there is no executable file.
    """
    if not program.is_file() or not os.access(program, os.X_OK):
        raise StartupError(f"--tritonserver {program}: expected the path of an executable tritonserver")
    return ServerFiles(program.absolute(), None, is_bundled=False)


def bundled_server(package: Path | None, python: tuple[int, int], backends: Path) -> ServerFiles:
    """The server in the package nvidia-pytriton, with a private backends directory of symbolic links.

    With links the package stays as it was installed, and each file finds its libraries by their path
    relative to the file's real location.

    Args:
        package: pytriton's folder; None: not installed.
        python: Python version of the stub.
        backends: the directory to create.

    Raises:
        StartupError: the package or its stub is missing, or cannot be made executable.
    """
    if package is None:
        raise StartupError(
            f"no tritonserver: {WITH_SERVER}, or run `pip install --no-deps nvidia-pytriton==0.7.0`, or name "
            "an installed one with --tritonserver PATH"
        )
    root = package / "tritonserver"
    stub = root / "python_backend_stubs" / f"{python[0]}.{python[1]}" / STUB_NAME
    backend = root / "backends" / "python"
    for path in (root / "bin" / "tritonserver", stub, backend):
        if not path.exists():
            raise StartupError(
                f"{path} is missing: run `pip install --force-reinstall --no-deps nvidia-pytriton==0.7.0`; "
                f"it must have a stub for Python {python[0]}.{python[1]}"
            )
    _make_executable(root / "bin" / "tritonserver")
    _make_executable(stub)
    links = backends / "python"
    links.mkdir(parents=True)
    for file in backend.iterdir():
        if file.is_file() and file.name != STUB_NAME:
            (links / file.name).symlink_to(file)
    (links / STUB_NAME).symlink_to(stub)
    return ServerFiles(root / "bin" / "tritonserver", backends, is_bundled=True)


def package_directory() -> Path | None:
    """Return pytriton's folder without importing it; None if it is not installed."""
    spec = importlib.util.find_spec("pytriton")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def server_environment(environment: Mapping[str, str], library_dir: str | None) -> dict[str, str]:
    """The server's environment.

    The stub runs the first Python on PATH, and finds libpython by LD_LIBRARY_PATH. The C library takes memory
    from an arena for each core, unless MALLOC_ARENA_MAX says another number: from the eight that it takes by
    itself the server's memory grows with each reload of a model.
    """
    paths = {"PATH": str(Path(sys.executable).parent)}
    if library_dir is not None:
        paths["LD_LIBRARY_PATH"] = library_dir
    num_arenas = max(_LEAST_ARENAS, len(os.sched_getaffinity(0)))
    changed = {"MALLOC_ARENA_MAX": str(num_arenas), **environment}
    for name, first in paths.items():
        rest = environment.get(name, "")
        changed[name] = f"{first}:{rest}" if rest else first
    return changed


def _make_executable(path: Path) -> None:
    mode = path.stat().st_mode
    wanted = mode | stat.S_IXUSR | ((mode & 0o044) >> 2)
    if os.access(path, os.X_OK):
        return
    try:
        path.chmod(wanted)
    except OSError as error:
        raise StartupError(
            f"{path} can not be made executable ({error.strerror}): its owner must run `chmod a+x {path}`"
        ) from None
