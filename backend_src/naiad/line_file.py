"""Files that several processes append lines to."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from pathlib import Path

from naiad.errors import ConfigError

_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC


def prepare(option: str, path: Path) -> None:
    """Make the file, for this user alone, or check the one that there is.

    Args:
        option: the option that names it, for messages.
        path: the file.

    Raises:
        ConfigError: it cannot be written, or others may read it.
    """
    try:
        opened = os.open(path, _FLAGS | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except OSError as error:
        raise ConfigError(option, str(path), f"a file that can be written ({error.strerror})") from None
    try:
        status = os.fstat(opened)
    finally:
        os.close(opened)
    if not stat.S_ISREG(status.st_mode) or status.st_mode & 0o077:
        raise ConfigError(option, str(path), "a new file, or one that only you may read (mode 0600)")


def append(path: Path, lines: bytes) -> None:
    """Append whole lines in one call, so that those of several processes do not mix.

    If only a part can be written, it is taken back: no line is torn, and all can be written again. The file
    is opened for each call: it may be moved away while it grows.

    Raises:
        OSError: it cannot be written.
    """
    opened = os.open(path, _FLAGS, 0o600)
    try:
        # Some file systems have no locks, and whoever holds one may not hold up the engine.
        with contextlib.suppress(OSError):
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        num_written = os.write(opened, lines)
        if num_written != len(lines):
            _take_back(opened, num_written)
            raise OSError("the disk is full")
    finally:
        os.close(opened)


def _take_back(opened: int, num_bytes: int) -> None:
    """Remove the bytes that were written last, if nobody has written after them.

    Raises:
        OSError: it is a pipe or a device, or may only grow.
    """
    end = os.lseek(opened, 0, os.SEEK_CUR)
    if os.fstat(opened).st_size == end:
        os.ftruncate(opened, end - num_bytes)
