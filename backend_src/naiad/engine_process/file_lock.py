"""A lock between processes that leaves no trace, neither when it is given back nor when its holder dies."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


class FileLock:
    """A file that at most one process holds; it is there while somebody does."""

    def __init__(self, path: Path) -> None:
        """Take nothing yet."""
        self._path = path
        self._descriptor: int | None = None

    def try_take(self) -> bool:
        """Take it if nobody has it.

        Returns:
            Whether this object holds it now.

        Raises:
            OSError: the file can not be made; FileNotFoundError when its directory is gone.
        """
        return self._take(fcntl.LOCK_EX | fcntl.LOCK_NB)

    def take(self) -> None:
        """Take it, waiting for whoever has it.

        Raises:
            OSError: as `try_take`.
        """
        while not self._take(fcntl.LOCK_EX):
            # The one who had it has removed the file.
            continue

    def release(self) -> None:
        """Give it back, if held."""
        if self._descriptor is not None:
            # Before the lock goes: who takes it meanwhile finds that the file has another inode.
            self._path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = None

    def _take(self, operation: int) -> bool:
        if self._descriptor is not None:
            return True
        descriptor = os.open(self._path, os.O_CREAT | os.O_RDWR, 0o600)
        if self._lock(descriptor, operation):
            self._descriptor = descriptor
            return True
        os.close(descriptor)
        return False

    def _lock(self, descriptor: int, operation: int) -> bool:
        try:
            fcntl.flock(descriptor, operation)
            return os.path.samestat(os.fstat(descriptor), os.stat(self._path))
        except (BlockingIOError, FileNotFoundError):
            return False
