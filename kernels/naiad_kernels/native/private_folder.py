"""Folders in the user's cache that belong to this user alone."""

from __future__ import annotations

import os
from pathlib import Path


def cache_path(*names: str) -> Path:
    """The path of a folder in the user's cache, which need not exist.

    Args:
        names: of the folder, below `naiad`.

    Raises:
        RuntimeError: the user has no home directory.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache").joinpath("naiad", *names)


def private_folder(*names: str, makes: bool = True) -> Path | None:
    """Find a folder of mode 0700 in the user's cache.

    Args:
        names: of the folder, below `naiad`.
        makes: whether it is made if it is not there.

    Returns:
        The folder; None if it is not there or cannot be made, or if others may read or write it.
    """
    try:
        folder = cache_path(*names)
        if makes:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except (OSError, RuntimeError):
        return None
    return folder if found.st_uid == os.getuid() and found.st_mode & 0o077 == 0 else None
