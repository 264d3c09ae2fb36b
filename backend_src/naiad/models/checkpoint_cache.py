"""Where what has been made of a checkpoint, or measured with it, is kept for the next start."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from functools import cached_property
from pathlib import Path

from naiad.config.quantised import OLDER_FILES
from naiad.models.file_hashes import FileHashes
from naiad_kernels.native.private_folder import private_folder

_FOLDER = ".naiad"
_HASHES = "hashes.json"
_SOURCES = ("*.safetensors", "*.safetensors.index.json", "config.json", *OLDER_FILES.values())


class CheckpointCache:
    """Files that belong to a checkpoint: beside it, or in the user's cache if nothing can be written there.

    Attributes:
        model_dir: the checkpoint's directory, or its GGUF file.
    """

    def __init__(self, model_dir: str | Path) -> None:
        """Belong to a checkpoint; nothing is read or written yet."""
        self.model_dir = Path(model_dir)
        is_file = self.model_dir.is_file()
        self._directory = self.model_dir.parent if is_file else self.model_dir
        # Several files may lie in one directory.
        self._beside = self._directory / (f".{self.model_dir.name}{_FOLDER}" if is_file else _FOLDER)

    @cached_property
    def fingerprint(self) -> str:
        """The hash of configuration and weights, in hexadecimal digits.

        Raises:
            OSError: a file cannot be read.
        """
        digest = hashlib.sha256()
        for path in self._sources:
            digest.update(f"{path.name} {self.sha256(path)}\n".encode())
        return digest.hexdigest()

    def sha256(self, path: Path, start: int = 0) -> str:
        """The hash of a file of the checkpoint or of this cache, from `start` on; see `FileHashes`.

        Raises:
            OSError: the file cannot be read.
        """
        digest = self._hashes.sha256(path, start)
        self._save()
        return digest

    def remember(self, path: Path, start: int, sha256: str) -> None:
        """Remember the hash of a file of this cache that has just been written; see `FileHashes`.

        Raises:
            OSError: the file is not there.
        """
        self._hashes.remember(path, start, sha256)
        self._save()

    @cached_property
    def is_unchanged(self) -> bool:
        """Whether the checkpoint is the one of which `fingerprint` speaks; to be asked after reading it."""
        return CheckpointCache(self.model_dir).fingerprint == self.fingerprint

    def find(self, name: str) -> list[Path]:
        """The files of this name that are there: beside the checkpoint, and in the user's cache."""
        folders = [self._beside if _is_trusted(self._beside) else None, self._private(makes=False)]
        return [folder / name for folder in folders if folder is not None and (folder / name).is_file()]

    @cached_property
    def folder(self) -> Path | None:
        """The folder for new files, which exists; None: no file can be kept."""
        with contextlib.suppress(OSError):
            # Who may read the checkpoint may read what is made of it.
            self._beside.mkdir(mode=0o700 | self._directory.stat().st_mode & 0o055, exist_ok=True)
        if _is_trusted(self._beside) and os.access(self._beside, os.W_OK):
            return self._beside
        return self._private(makes=True)

    @cached_property
    def file_mode(self) -> int:
        """Permissions of new files: nobody else may read them who may not read the checkpoint."""
        readers = 0o044
        for path in self._sources:
            readers &= path.stat().st_mode
        return 0o600 | readers

    def _save(self) -> None:
        if self.folder is not None:
            with contextlib.suppress(OSError):  # then files are hashed again at the next start
                self._hashes.save(self.folder / _HASHES, self.file_mode)

    @cached_property
    def _hashes(self) -> FileHashes:
        found = self.find(_HASHES)
        return FileHashes(found[0] if found else None)

    @cached_property
    def _sources(self) -> list[Path]:
        if self.model_dir.is_file():
            return [self.model_dir]
        return sorted(path for pattern in _SOURCES for path in self.model_dir.glob(pattern))

    def _private(self, *, makes: bool) -> Path | None:
        name = hashlib.sha256(os.fsencode(self.model_dir.resolve())).hexdigest()[:16]
        return private_folder("checkpoints", name, makes=makes)


def _is_trusted(folder: Path) -> bool:
    """Whether only this user, the superuser or the checkpoint's owner may have written there.

    A link is not: a checkpoint could bring it along, and what is kept would be written wherever it leads.
    """
    try:
        found = folder.lstat()
        owners = {0, os.getuid(), folder.parent.stat().st_uid}
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid in owners and not found.st_mode & 0o022
