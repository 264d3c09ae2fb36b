"""Python environments of their own for other programs, with pinned packages."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

from perf.common.report import ROOT

from naiad.errors import StartupError

_TORCH = ROOT / "requirements" / "torch.txt"
_PYTHON = (3, 11)
_ERROR_TAIL_CHARS = 600


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
    python, mark = folder / "bin" / "python", folder / ".installed"
    state = hashlib.sha256(lock.read_bytes() + _TORCH.read_bytes()).hexdigest()
    if mark.is_file() and mark.read_text() == state:
        return python
    if sys.version_info[:2] != _PYTHON:
        raise StartupError(
            f"Python is {sys.version.split()[0]}: the locks are for 3.11, make PYTHON=python3.11"
        )
    print(f"{folder.name}: installing into {folder.relative_to(ROOT)}", flush=True)
    run_installer([sys.executable, "-m", "venv", str(folder)], folder.name)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "-q", *pip_args.split()]
    if needs_torch:
        run_installer([*pip, "-r", str(_TORCH)], folder.name)
    run_installer([*pip, "--no-deps", "--require-hashes", "-r", str(lock)], folder.name)
    mark.write_text(state)
    return python


def run_installer(command: list[str], name: str, cwd: Path | None = None) -> None:
    """Run a command that installs an environment.

    Raises:
        StartupError: it failed; the message has the name and the end of what it said.
    """
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, cwd=cwd
    )
    if done.returncode:
        raise StartupError(f"{name} can not be installed here: {done.stdout.strip()[-_ERROR_TAIL_CHARS:]}")
