"""A lock between processes, which the kernel releases when its holder dies."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


class FileLock:
    """A file that at most one process has locked; it is removed when the lock is released."""

    def __init__(self, path: Path) -> None:
        """Set up; the lock is not taken yet."""
        self._path = path
        self._descriptor: int | None = None

    def try_take(self) -> bool:
        """Take the lock if no one holds it.

        Returns:
            Whether this object holds it now.

        Raises:
            OSError: the file cannot be created; FileNotFoundError if its directory is gone.
        """
        return self._take(fcntl.LOCK_EX | fcntl.LOCK_NB)

    def take(self) -> None:
        """Take the lock, waiting until it is released.

        Raises:
            OSError: the file cannot be created.
        """
        while not self._take(fcntl.LOCK_EX):
            # The last holder has removed the file that was locked.
            continue

    def release(self) -> None:
        """Release the lock if it is held."""
        if self._descriptor is not None:
            # Removed before the lock is released: a process that waited sees that the inode has changed.
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
