"""A snapshot of a repository for a server: what users edit meanwhile changes nothing."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from naiad.cli.repository.model_entries import CONFIG_NAME, ModelEntry
from naiad.errors import StartupError
from naiad.file_identity import FileIdentity

# Larger files are linked.
_COPIED_BYTES = 1 << 20


class RepositorySnapshot:
    """Small files are copied, large ones linked: hard, or else by name, and then they can change.

    Attributes:
        directory: the snapshot, which a server can serve.
    """

    def __init__(self, source: Path, entries: Sequence[ModelEntry], directory: Path) -> None:
        """Make the snapshot.

        Args:
            source: the repository that the entries were read from.
            entries: its models, with the configurations that the snapshot gets.
            directory: the directory to create.

        Raises:
            StartupError: a file of the repository can not be read, or the snapshot can not be written.
        """
        from google.protobuf import text_format

        self.directory = directory
        self._linked: dict[Path, FileIdentity] = {}
        directory.mkdir(mode=0o700)
        for entry in entries:
            target = directory / entry.name
            self._copy(source / entry.name, target)
            if entry.is_ours:
                text = text_format.MessageToString(entry.config)
                (target / CONFIG_NAME).write_text(text, encoding="utf-8")

    def changes(self) -> list[str]:
        """Say which of the large files have changed since the snapshot was made, as the server will see them.

        Raises:
            StartupError: one is gone.
        """
        changed = []
        for path, identity in self._linked.items():
            try:
                is_same = FileIdentity.of(path) == identity
            except OSError as error:
                raise StartupError(
                    f"{path} is gone since the start ({error.strerror}): put the repository back, or start "
                    "`naiad serve` again with its new place"
                ) from None
            if not is_same:
                changed.append(f"{path} has changed since the start, and the server now loads it as it is")
                self._linked[path] = FileIdentity.of(path)
        return changed

    def _copy(self, source: Path, target: Path) -> None:
        ignore = shutil.ignore_patterns("__pycache__")
        try:
            shutil.copytree(source, target, ignore=ignore, copy_function=self._take)
        except shutil.Error as error:
            path, _, reason = error.args[0][0]
            raise StartupError(f"the repository can not be copied: {path}: {reason}") from None
        except OSError as error:
            raise StartupError(f"the repository can not be copied: {error}") from None

    def _take(self, source: str, target: str) -> None:
        original = Path(os.path.realpath(source))
        if original.stat().st_size <= _COPIED_BYTES:
            shutil.copy2(original, target)
            return
        identity = FileIdentity.of(original)
        with contextlib.suppress(OSError):
            os.link(original, target)
            # Whoever writes into the file, instead of replacing it, changes the snapshot too.
            self._linked[Path(target)] = identity
            return
        Path(target).symlink_to(original)
        self._linked[original] = identity
