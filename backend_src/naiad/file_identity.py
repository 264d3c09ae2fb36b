"""What tells a file from a later one at its place, without reading it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """A file as it was when it was looked at; a link to it that is made later changes nothing of this."""

    inode: int
    size_bytes: int
    modified_ns: int

    @classmethod
    def of(cls, path: Path) -> FileIdentity:
        """Look at a file.

        Raises:
            OSError: it cannot be looked at.
        """
        status = path.stat()
        return cls(status.st_ino, status.st_size, status.st_mtime_ns)
