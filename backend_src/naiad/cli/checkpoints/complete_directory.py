"""Directories that are complete or absent: filled elsewhere, sealed by a manifest, renamed into place."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from naiad.engine_process import FileLock

MANIFEST = "naiad-manifest.json"
_FORMAT = 1
_READ_BYTES = 1 << 20
# What `tempfile` puts between prefix and suffix.
_RANDOM_NAME = "[a-z0-9_]{8}"


def is_complete(directory: Path) -> bool:
    """Whether the directory has a manifest of ours and each file has the size that it records."""
    try:
        manifest: Any = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != _FORMAT or not manifest["files"]:
            return False
        return all(
            (directory / name).stat().st_size == file["size_bytes"]
            for name, file in manifest["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def fill_directory(directory: Path, make: Callable[[Path], None]) -> None:
    """Let `make` fill a new directory, seal it, and replace `directory` with it.

    Whatever goes wrong, `directory` is unchanged or complete. The caller holds the lock: partial
    directories that killed processes left behind are removed.

    Args:
        directory: its parent must exist; an earlier directory there is removed.
        make: fills the empty directory it is given.
    """
    for leftover in _leftovers(directory):
        shutil.rmtree(leftover, ignore_errors=True)
    partial = Path(tempfile.mkdtemp(dir=directory.parent, prefix=f".{directory.name}-", suffix=".partial"))
    try:
        content = partial / "content"
        content.mkdir()
        make(content)
        _seal(content)
        if directory.exists():
            directory.rename(partial / "replaced")
        content.rename(directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _leftovers(directory: Path) -> list[Path]:
    """Partial directories of this directory alone: those of NAME-OTHER are under another lock."""
    pattern = re.compile(re.escape(f".{directory.name}-") + _RANDOM_NAME + re.escape(".partial"))
    return [path for path in directory.parent.iterdir() if pattern.fullmatch(path.name)]


@contextmanager
def exclusive_lock(directory: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Hold a lock file next to `directory`; the kernel releases it if this process dies."""
    lock = FileLock(directory.parent / f".{directory.name}.lock")
    if not lock.try_take():
        say(f"another process makes {directory}: waiting for it")
        lock.take()
    try:
        yield
    finally:
        lock.release()


def _seal(directory: Path) -> None:
    """Write the manifest last, after the files have been synced to disk."""
    files = {}
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while chunk := file.read(_READ_BYTES):
                digest.update(chunk)
            os.fsync(file.fileno())
        name = str(path.relative_to(directory))
        files[name] = {"size_bytes": path.stat().st_size, "sha256": digest.hexdigest()}
    with (directory / MANIFEST).open("w", encoding="utf-8") as file:
        json.dump({"format": _FORMAT, "files": files}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
