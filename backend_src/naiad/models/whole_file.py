"""Files that appear complete or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_SUFFIX = ".part"


@contextlib.contextmanager
def written_whole(path: Path, mode: int = 0o600) -> Iterator[BinaryIO]:
    """Open a new file that replaces `path` when the block ends, and is removed if the block raises.

    Several processes may do this at once; the last one's file stays. Who has the old file open keeps it.

    Args:
        path: in a directory that exists.
        mode: the file's permissions.

    Raises:
        OSError: the file cannot be written.
    """
    descriptor, part = _new_part(path)
    try:
        with os.fdopen(descriptor, "w+b") as file:
            yield file
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
            # While it is locked, nobody takes it for one that was left.
            part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def replace_file(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Write a small file in one piece.

    Raises:
        OSError: the file cannot be written.
    """
    with written_whole(path, mode) as file:
        file.write(content)


def remove_left_parts(folder: Path) -> None:
    """Remove the unfinished files of processes that were killed; those that are being written stay."""
    for part in folder.glob(f".*{_SUFFIX}"):
        with contextlib.suppress(OSError):
            descriptor = os.open(part, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            with os.fdopen(descriptor, "rb"):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                part.unlink()


def _new_part(path: Path) -> tuple[int, Path]:
    """Create a file beside a path, and lock it: the kernel releases the lock when the process ends."""
    while True:
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=_SUFFIX, dir=path.parent)
        # Where the file system has no locks, nobody removes what is not locked either.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if Path(name).exists():
            return descriptor, Path(name)
        # It was taken for one that was left before it was locked.
        os.close(descriptor)
