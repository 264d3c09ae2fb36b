"""The private directory of one `naiad serve`, and what is left of those that were killed."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from naiad.cli.serve.shared_memory import REGION_PREFIX, remove_regions_with_prefix
from naiad.engine_process.file_lock import FileLock
from naiad.temporary import temporary_directory

_PREFIX = "naiad-serve-"
_LOCK = "lock"


@contextlib.contextmanager
def runtime_folder() -> Iterator[Path]:
    """Make the directory for a `with` block, and first remove what killed processes have left."""
    _sweep(temporary_directory())
    with contextlib.ExitStack() as stack:
        folder, lock = _locked_folder(stack)
        try:
            yield folder
        finally:
            remove_regions_with_prefix(region_prefix(folder))
            lock.release()


def region_prefix(folder: Path) -> str:
    """How the names of the server's regions in /dev/shm begin."""
    return f"{REGION_PREFIX}{folder.name}_"


def _locked_folder(stack: contextlib.ExitStack) -> tuple[Path, FileLock]:
    while True:
        made = tempfile.TemporaryDirectory(
            prefix=_PREFIX, dir=temporary_directory(), ignore_cleanup_errors=True
        )
        folder = Path(stack.enter_context(made))
        lock = FileLock(folder / _LOCK)
        # Another start may sweep the directory in the moment before it is locked.
        with contextlib.suppress(FileNotFoundError):
            if lock.try_take():
                return folder, lock


def _sweep(parent: Path) -> None:
    for folder in parent.glob(f"{_PREFIX}*"):
        # A directory of another user, or one that is just being made or removed.
        with contextlib.suppress(OSError):
            lock = FileLock(folder / _LOCK)
            is_ours = folder.lstat().st_uid == os.geteuid() and (folder / _LOCK).is_file()
            if is_ours and lock.try_take():
                remove_regions_with_prefix(region_prefix(folder))
                shutil.rmtree(folder, ignore_errors=True)
                lock.release()
