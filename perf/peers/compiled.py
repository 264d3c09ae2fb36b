"""Small C programs that measure the machine, compiled at each run."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from perf.peers.environments import BUILD

from naiad.errors import StartupError


def compiled(source: Path, flags: Sequence[str]) -> ctypes.CDLL:
    """Compile a file and load it.

    Args:
        source: a C file.
        flags: of the compiler.

    Raises:
        StartupError: the machine has no C compiler, or it cannot compile the file; the message has its words.
    """
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise StartupError("there is no C compiler: install one, such as gcc; llama.cpp needs it too")
    library = BUILD / f"{source.stem}.so"
    library.parent.mkdir(parents=True, exist_ok=True)
    unfinished = library.with_suffix(f".{os.getpid()}")
    command = [compiler, *flags, "-shared", "-fPIC", str(source), "-o", str(unfinished)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise StartupError(f"{compiler} can not compile {source.name}: {done.stderr.strip()}")
    unfinished.rename(library)
    return ctypes.CDLL(str(library))
