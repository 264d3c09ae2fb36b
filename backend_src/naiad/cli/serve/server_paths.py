"""Gives the server paths that it can take, whatever the user's are."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from naiad.cli.console import say
from naiad.cli.plain_paths import PLAIN_CHARACTERS, is_plain
from naiad.errors import StartupError
from naiad.temporary import temporary_directory

_OTHER_DIRECTORIES = (Path("/tmp"), Path("/var/tmp"), Path("/dev/shm"))


def use_plain_temporary_directory() -> Path:
    """Return the directory for temporary files; if the server cannot take its path, choose another one.

    The other one then holds for this process and its children, which find each other's sockets there.

    Raises:
        StartupError: there is no other one.
    """
    asked = temporary_directory()
    if is_plain(asked):
        return asked
    chosen = next((each for each in _OTHER_DIRECTORIES if os.access(each, os.W_OK | os.X_OK)), None)
    if chosen is None:
        raise StartupError(
            f"TMPDIR = {str(asked)!r}: the server can not take this path: expected a directory whose path "
            f"has {PLAIN_CHARACTERS}"
        )
    say(f"the server can not take the path {asked}: its temporary files go to {chosen}")
    os.environ["TMPDIR"] = tempfile.tempdir = str(chosen)
    return chosen


def plain_repository(source: Path, link: Path) -> Path:
    """Return the repository's path, or else `link`, which is made and leads there."""
    if is_plain(source):
        return source
    link.symlink_to(source)
    return link
