"""Files that users name and that are read whole."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

MAX_BYTES = 16 << 20


def read_private_file(path: Path) -> tuple[bytes, int]:
    """Read a file of settings or secrets, without waiting for anybody to write it.

    Returns:
        Its content, and its permissions.

    Raises:
        OSError: it can not be read, is no regular file, or is larger than `MAX_BYTES`.
    """
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as opened:
        mode = os.fstat(opened.fileno()).st_mode
        if not stat.S_ISREG(mode):
            raise OSError(0, "it is no regular file")
        return _read(opened), stat.S_IMODE(mode)


def read_settings(path: Path) -> bytes:
    """Read a file of settings, which may be a pipe.

    Raises:
        OSError: it can not be read, or is larger than `MAX_BYTES`.
    """
    with path.open("rb") as opened:
        return _read(opened)


def _read(opened: BinaryIO) -> bytes:
    content = opened.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise OSError(0, f"it is larger than {MAX_BYTES} bytes")
    return content
