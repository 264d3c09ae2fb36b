"""Compiled libraries, kept between starts in a directory that belongs to the user alone."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from naiad_kernels.native.private_folder import cache_path

_Loaded = TypeVar("_Loaded")
# Some versions of the sources, each in some variants.
MOST_LIBRARIES = 24
_LOCK, _BUILDING_LOCK = "lock", "building"


class LibraryCache:
    """A directory of libraries, each with its checksum: a disk may have been full, or the power gone.

    Processes share it. A lock on the whole directory is held while a library is put in or loaded, so none is
    removed between being found and being loaded. Afterwards it may be: what a process has mapped stays.
    Another lock is held while a library is built, so that two processes do not build the same one; who only
    loads one does not wait for that.

    Attributes:
        folder: where they are.
        is_writable: whether libraries can be added. If not, those that are there can still be used.
    """

    def __init__(self, folder: Path) -> None:
        """Use a directory that exists and that nobody else can write."""
        self.folder = folder
        self.is_writable = self._can_lock()

    @classmethod
    def of_user(cls) -> LibraryCache | None:
        """The cache in the user's cache directory; None where there cannot be one."""
        try:
            folder = cache_path("native")
            return cls(folder) if _is_private(folder) else None
        except (OSError, RuntimeError):
            return None

    def load(self, pattern: str, load: Callable[[Path], _Loaded]) -> _Loaded | None:
        """Load the library of that name that was used last.

        A home directory may have been shared with a machine of older or newer system libraries, so one that
        cannot be loaded is passed over, as a damaged one is.

        Args:
            pattern: its name without a suffix, as a glob pattern.
            load: loads the library at a path; raises `OSError` if it cannot be loaded.

        Returns:
            What `load` returns; None if there is no such library.
        """
        with self._locked(fcntl.LOCK_SH):
            for path in filter(_is_whole, self._by_last_use(pattern)):
                with suppress(OSError):
                    loaded = load(path)
                    with suppress(OSError):
                        os.utime(path)
                    return loaded
        return None

    def add(self, name: str, build: Callable[[Path], None], load: Callable[[Path], _Loaded]) -> _Loaded:
        """Load the library of that name, built if no other process was faster; then remove the oldest ones.

        Args:
            name: its name without a suffix.
            build: writes the library to a path.
            load: loads the library at a path; raises `OSError` if it cannot be loaded.

        Raises:
            OSError: the library cannot be written, or not be loaded as soon as it is built.
        """
        path = self.folder / f"{name}.so"
        part = path.with_suffix(".part")
        with self._locked(fcntl.LOCK_EX, _BUILDING_LOCK):
            with self._locked(fcntl.LOCK_SH), suppress(OSError):
                if _is_whole(path):
                    return load(path)
            try:
                build(part)
                with self._locked(fcntl.LOCK_EX):
                    self._put(part, path)
                    self._remove_oldest()
                    return load(path)
            finally:
                part.unlink(missing_ok=True)

    def _put(self, part: Path, path: Path) -> None:
        """Put what was built in its place in one move, and its checksum after it."""
        checksum = _checksum(part)
        part.replace(path)
        part.write_text(checksum)
        part.replace(_checksum_path(path))

    def _remove_oldest(self) -> None:
        """Keep the libraries that were used last, and nothing that a killed process has left."""
        for path in self._by_last_use("*")[MOST_LIBRARIES:]:
            path.unlink()
            _checksum_path(path).unlink(missing_ok=True)
        for part in self.folder.glob("*.part"):
            part.unlink()

    def _by_last_use(self, pattern: str) -> list[Path]:
        paths = self.folder.glob(f"{pattern}.so")
        return sorted(paths, key=lambda path: path.stat().st_mtime_ns, reverse=True)

    def _can_lock(self) -> bool:
        """Whether the lock can be had; a file system may be read-only, or have no locks."""
        try:
            with (self.folder / _LOCK).open("a") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return True

    @contextmanager
    def _locked(self, operation: int, name: str = _LOCK) -> Iterator[None]:
        """Hold the lock of that name; where there can be none, nobody adds or removes libraries."""
        if not self.is_writable:
            yield
            return
        with (self.folder / name).open("a") as lock:
            fcntl.flock(lock, operation)
            yield


def _is_private(folder: Path) -> bool:
    """Whether it is, or has been made, a directory of this user's with mode 0700.

    One that others could write is replaced by an empty one: what is in it may be theirs.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        return False
    if found.st_mode & 0o022:
        shutil.rmtree(folder)
        folder.mkdir(mode=0o700)
    elif found.st_mode & 0o077:
        folder.chmod(0o700)
    return True


def _is_whole(library: Path) -> bool:
    """Whether the library is there as it was compiled."""
    try:
        return _checksum(library).encode() == _checksum_path(library).read_bytes()
    except OSError:
        return False


def _checksum(library: Path) -> str:
    return hashlib.sha256(library.read_bytes()).hexdigest()


def _checksum_path(library: Path) -> Path:
    return library.with_suffix(".sha256")
