"""The directory for temporary files, which processes that look for each other there must agree on."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

_VARIABLES = ("TMPDIR", "TEMP", "TMP")
_DIRECTORIES = ("/tmp", "/var/tmp", "/usr/tmp")


def temporary_directory() -> Path:
    """Return the directory of TMPDIR, TEMP or TMP, or one of the usual ones, also while it is full.

    `tempfile` tries to write a file, and chooses another directory when there is no room for it.

    Raises:
        FileNotFoundError: there is none.
    """
    for path in (*(os.environ.get(each) for each in _VARIABLES), *_DIRECTORIES):
        if path and os.path.isdir(path) and os.access(path, os.W_OK | os.X_OK):
            return Path(os.path.abspath(path))
    return Path(tempfile.gettempdir())
