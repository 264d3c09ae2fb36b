"""Python environments of their own for other programs, with pinned packages."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from naiad.errors import StartupError

_ERROR_TAIL_CHARS = 600


def make_environment(
    folder: Path, installs: Sequence[Sequence[str]], state: str, say: Callable[[str], None]
) -> Path:
    """Return the interpreter of an environment, which is made first if its packages have changed.

    Args:
        folder: where the environment is; its name is its name in messages.
        installs: the words of `pip install` of each run, in order.
        state: changes with the packages.
        say: called with a line before anything is installed.

    Raises:
        StartupError: it cannot be installed; the message has pip's own words.
    """
    python, mark = folder / "bin" / "python", folder / ".installed"
    if mark.is_file() and mark.read_text() == state:
        return python
    say(f"{folder.name}: installing into {folder}")
    run_installer([sys.executable, "-m", "venv", str(folder)], folder.name)
    for words in installs:
        command = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "-q", *words]
        run_installer(command, folder.name)
    mark.write_text(state)
    return python


def run_installer(command: Sequence[str], name: str, cwd: Path | None = None) -> None:
    """Run a command that installs an environment.

    Raises:
        StartupError: it failed; the message has the name and the end of what it said.
    """
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, cwd=cwd
    )
    if done.returncode:
        raise StartupError(f"{name} can not be installed here: {done.stdout.strip()[-_ERROR_TAIL_CHARS:]}")
