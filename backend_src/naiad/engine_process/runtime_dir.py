"""The private directory where one server's processes keep their sockets."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import tempfile
from pathlib import Path

from naiad.errors import StartupError


def runtime_directory(server_pid: int) -> Path:
    """The directory of the server with this process id, made if need be.

    Every process of one server gets the same path: `<temporary directory>/naiad-<user>-<pid
    namespace>-<server's pid>`. Directories that dead servers left are removed.

    Args:
        server_pid: of tritonserver, i.e. `os.getppid()` in a stub.

    Raises:
        StartupError: it can not be made, or belongs to somebody else.
    """
    path = runtime_path(server_pid)
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        _check_is_private(path)
    except OSError as error:
        raise StartupError(f"{path} can not be made: {error.strerror}; set TMPDIR") from error
    _remove_leftovers(path.parent, _name_prefix())
    return path


def runtime_path(server_pid: int) -> Path:
    """Where `runtime_directory` makes it; it may not be there."""
    return Path(tempfile.gettempdir()) / f"{_name_prefix()}{server_pid}"


def remove_runtime_directory(path: Path) -> None:
    """Remove it with what is in it; not there is fine."""
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(path)


def _name_prefix() -> str:
    # Containers may share a temporary directory and both have a server with process id 1.
    try:
        namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        namespace = 0
    return f"naiad-{os.geteuid()}-{namespace}-"


def _check_is_private(path: Path) -> None:
    status = path.lstat()
    is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    if not is_ours or status.st_mode & 0o077:
        raise StartupError(f"{path} is not a private directory of this user; remove it")


def _remove_leftovers(parent: Path, prefix: str) -> None:
    pattern = re.compile(re.escape(prefix) + r"(\d+)")
    for path in parent.glob(f"{prefix}*"):
        match = pattern.fullmatch(path.name)
        if match is None or _is_alive(int(match[1])):
            continue
        # Somebody else's, or removed by somebody else meanwhile: not our business.
        with contextlib.suppress(StartupError, OSError):
            _check_is_private(path)
            shutil.rmtree(path)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
