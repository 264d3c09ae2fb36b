"""Files that appear complete or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


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
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    part = Path(name)
    try:
        with os.fdopen(descriptor, "w+b") as file:
            yield file
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
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
