"""Which paths a tritonserver can take for a repository and its models.

The Python backend writes the paths of a model and of its own files, unquoted, into a shell's command line,
and the stub's Python reads them as ASCII whatever the locale is.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

PLAIN_CHARACTERS = "ASCII letters, digits and _ . / + : , @ % = - only"
_PLAIN = re.compile(r"[A-Za-z0-9_./+:,@%=-]+")


def is_plain(path: Path | str) -> bool:
    """Whether the server can take this path."""
    return _PLAIN.fullmatch(str(path)) is not None


def shown(path: Path) -> str:
    """Return the path with escapes for what stdout or stderr can not take."""
    text = os.fsencode(path).decode("utf-8", "backslashreplace")
    for stream in (sys.stdout, sys.stderr):
        encoding = getattr(stream, "encoding", None) or "utf-8"
        text = text.encode(encoding, "backslashreplace").decode(encoding)
    return text
