"""The private directory for the sockets of one server's processes."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
from pathlib import Path

from naiad.errors import StartupError
from naiad.temporary import temporary_directory


def runtime_directory(server_pid: int) -> Path:
    """Return the directory of the server with this process id; it is created if necessary.

    Every process of one server gets the same path: `<temporary directory>/naiad-<user>-<pid
    namespace>-<server's pid>`. Directories of dead servers are removed.

    Args:
        server_pid: process id of tritonserver, which is `os.getppid()` in a stub.

    Raises:
        StartupError: the directory cannot be created, or belongs to another user.
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


def runtime_directories_below(pid: int) -> list[Path]:
    """The existing directories of the live servers among this process and its descendants.

    Anyone may make a directory of such a name, so those that are not private to this user are left out.
    """
    prefix, parent = _name_prefix(), temporary_directory()
    # `glob` takes several times as long where there are many files.
    names = [name for name in os.listdir(parent) if name.startswith(prefix)] if parent.is_dir() else []
    return [
        parent / name
        for name in names
        if _is_below(name.removeprefix(prefix), pid) and _is_private(parent / name)
    ]


def runtime_path(server_pid: int) -> Path:
    """The path of the server's runtime directory, which need not exist."""
    return temporary_directory() / f"{_name_prefix()}{server_pid}"


def remove_runtime_directory(path: Path) -> None:
    """Remove the directory and its contents if it exists."""
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(path)


def _name_prefix() -> str:
    # Two containers may share a temporary directory, and each have a server with process id 1.
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


def _is_private(path: Path) -> bool:
    try:
        _check_is_private(path)
    except (StartupError, OSError):
        return False
    return True


def _remove_leftovers(parent: Path, prefix: str) -> None:
    pattern = re.compile(re.escape(prefix) + r"(\d+)")
    for path in parent.glob(f"{prefix}*"):
        match = pattern.fullmatch(path.name)
        if match is None or _is_alive(int(match[1])):
            continue
        # It may belong to another user, or another process may have removed it.
        with contextlib.suppress(StartupError, OSError):
            _check_is_private(path)
            shutil.rmtree(path)


def _is_below(server_pid: str, pid: int) -> bool:
    if not (server_pid.isascii() and server_pid.isdigit()):
        return False
    process = int(server_pid)
    parent = _parent(process)
    if parent is None:
        return False
    while process != pid and parent:
        process, parent = parent, _parent(parent)
    return process == pid


def _parent(pid: int) -> int | None:
    """The parent's process id, 0 for the first process; None if there is no such process."""
    try:
        # The name before it, in parentheses, may hold any character.
        status = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2]
    except OSError:
        return None
    return int(status.split()[1])


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
