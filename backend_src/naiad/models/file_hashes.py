"""SHA-256 of files, remembered for as long as nobody has touched them."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from pathlib import Path
from typing import BinaryIO

import msgspec

from naiad.models.whole_file import replace_file

_CHUNK_BYTES = 1 << 20
# A file that is changed twice within a tick of the file system's clock looks the same after both.
_CLOCK_TICK_NS = 2_000_000_000
# Longer than a tick of the kernel's clock.
_TICK_S = 0.02


class _Seen(msgspec.Struct, frozen=True, array_like=True):
    """A file's state when it was hashed; any write, rename or copy changes the time of its last change."""

    size: int
    modified_ns: int
    changed_ns: int
    inode: int

    @classmethod
    def of(cls, found: os.stat_result) -> _Seen:
        """Read the state."""
        return cls(found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino)


class _Hash(msgspec.Struct, frozen=True):
    seen: _Seen
    sha256: str


class FileHashes:
    """Hashes files. A large file is read once, and again only if its size, times or inode have changed.

    A file that was changed within the last two seconds before it was hashed is not remembered: a further
    change might leave its times as they are.
    """

    def __init__(self, memory: Path | None) -> None:
        """Read what was remembered; a missing or damaged memory is an empty one.

        Args:
            memory: a file that `save` has written, or None.
        """
        self._known: dict[str, _Hash] = {}
        self._is_changed = False
        with contextlib.suppress(OSError, msgspec.DecodeError, UnicodeDecodeError):
            if memory is not None:
                self._known = msgspec.json.decode(memory.read_bytes(), type=dict[str, _Hash])

    def sha256(self, path: Path, start: int = 0) -> str:
        """Return the hash of a file's bytes from `start` on, in hexadecimal digits.

        Raises:
            OSError: the file cannot be read.
        """
        name = _name(path, start)
        known = self._known.get(name)
        if known is not None and known.seen == _Seen.of(path.stat()):
            return known.sha256
        with path.open("rb") as file:
            began_ns = time.time_ns()
            seen = _Seen.of(os.fstat(file.fileno()))
            digest = _sha256(file, start)
            is_steady = seen == _Seen.of(os.fstat(file.fileno()))
        if is_steady and seen.changed_ns + _CLOCK_TICK_NS < began_ns:
            self._known[name] = _Hash(seen, digest)
            self._is_changed = True
        return digest

    def remember(self, path: Path, start: int, sha256: str) -> None:
        """Remember the hash of a file that this process has just written, and nobody else does.

        Args:
            path: the file, in its place.
            start: first byte that was hashed.
            sha256: of what was written, in hexadecimal digits.

        Raises:
            OSError: the file is not there.
        """
        seen = _Seen.of(path.stat())
        # Who changes it from now on gives it another time.
        time.sleep(_TICK_S)
        self._known[_name(path, start)] = _Hash(seen, sha256)
        self._is_changed = True

    def save(self, memory: Path, mode: int) -> None:
        """Write what is remembered to a file, if there is anything new.

        Args:
            memory: the file.
            mode: its permissions.

        Raises:
            OSError: the file cannot be written.
        """
        if self._is_changed:
            replace_file(memory, msgspec.json.encode(self._known), mode)
            self._is_changed = False


def _name(path: Path, start: int) -> str:
    return f"{path.name}+{start}"


def _sha256(file: BinaryIO, start: int) -> str:
    digest, chunk = hashlib.sha256(), bytearray(_CHUNK_BYTES)
    file.seek(start)
    while num_read := file.readinto(chunk):  # type: ignore[attr-defined]
        digest.update(memoryview(chunk)[:num_read])
    return digest.hexdigest()
