"""The tritonserver binary, its backends directory and its environment."""

from __future__ import annotations

import importlib.util
import os
import stat
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from naiad.errors import StartupError

# The backend's program that runs one Python model.
STUB_NAME = "triton_python_backend_stub"


@dataclass(frozen=True, slots=True)
class ServerFiles:
    """What to run.

    Attributes:
        program: tritonserver.
        backend_directory: for --backend-directory; None: the server's own.
        is_bundled: whether it is the one of the Python package.
    """

    program: Path
    backend_directory: Path | None
    is_bundled: bool


def installed_server(program: Path) -> ServerFiles:
    """A server that is already on this machine, as `--tritonserver` names it.

    Raises:
        StartupError: no program there.
    """
    if not program.is_file() or not os.access(program, os.X_OK):
        raise StartupError(f"--tritonserver {program}: expected the path of an executable tritonserver")
    return ServerFiles(program.absolute(), None, is_bundled=False)


def bundled_server(package: Path | None, python: tuple[int, int], backends: Path) -> ServerFiles:
    """The server of the Python package, with a private backends directory of links.

    Links keep the package as it was installed, and let each file find its libraries by the path
    relative to its real place.

    Args:
        package: pytriton's folder; None: not installed.
        python: of the stub.
        backends: a new directory.

    Raises:
        StartupError: the package or its stub is missing, or the run bits can not be set.
    """
    if package is None:
        raise StartupError(
            "no tritonserver: run `pip install --no-deps nvidia-pytriton==0.7.0`, "
            "or name an installed one with --tritonserver PATH"
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
    """Pytriton's folder; it is never imported."""
    spec = importlib.util.find_spec("pytriton")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def server_environment(environment: Mapping[str, str], library_dir: str | None) -> dict[str, str]:
    """The server's environment.

    The stub takes its Python from the first one on PATH, and libpython from LD_LIBRARY_PATH.
    """
    paths = {"PATH": str(Path(sys.executable).parent)}
    if library_dir is not None:
        paths["LD_LIBRARY_PATH"] = library_dir
    changed = dict(environment)
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
