"""Python environments of their own for other programs, with pinned packages and Naiad's version of torch."""

from __future__ import annotations

import hashlib
import sys
from functools import partial
from pathlib import Path

from perf.common.report import ROOT

from naiad.cli.environments import make_environment, run_installer
from naiad.errors import StartupError

__all__ = ["install", "run_installer"]

_TORCH = ROOT / "requirements" / "torch.txt"
_PYTHON = (3, 11)


def install(folder: Path, lock: Path, *, needs_torch: bool, pip_args: str = "") -> Path:
    """Return the interpreter of an environment, which is made first if its lock has changed.

    Args:
        folder: where the environment is; its name is its name in messages.
        lock: its packages, with hashes; all but torch.
        needs_torch: install Naiad's version of torch too.
        pip_args: further options of pip, such as an index with torch's CPU build.

    Raises:
        StartupError: it can not be installed; the message has pip's own words.
    """
    state = hashlib.sha256(lock.read_bytes() + _TORCH.read_bytes()).hexdigest()
    mark = folder / ".installed"
    if sys.version_info[:2] != _PYTHON and not (mark.is_file() and mark.read_text() == state):
        raise StartupError(
            f"Python is {sys.version.split()[0]}: the locks are for 3.11, make PYTHON=python3.11"
        )
    words = pip_args.split()
    installs = [[*words, "--no-deps", "--require-hashes", "-r", str(lock)]]
    if needs_torch:
        installs.insert(0, [*words, "-r", str(_TORCH)])
    return make_environment(folder, installs, state, partial(print, flush=True))
