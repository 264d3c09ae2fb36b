"""Compile the native kernels with the machine's C++ compiler, once for each source, compiler and variant."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from naiad_kernels.native.library import Library
from naiad_kernels.native.private_folder import private_folder
from naiad_kernels.native.variants import Variant

SOURCE_DIR = Path(__file__).parent / "src"
# Nothing is contracted to FMAs behind the source's back: all variants have to give the same bits.
COMPILE_FLAGS = (
    "-std=c++17",
    "-O3",
    "-shared",
    "-fPIC",
    "-pthread",
    "-fno-math-errno",
    "-ffp-contract=off",
    "-fvisibility=hidden",
)
_COMPILERS = ("g++", "clang++", "c++")
_TIMEOUT_S = 300


class BuildError(Exception):
    """The kernels cannot be compiled here; the text says why."""


def load(variant: Variant, extra_flags: Sequence[str] = ()) -> Library:
    """Load a variant's library; compile it first if the cache does not have it.

    Args:
        variant: how to compile.
        extra_flags: of the compiler, after all others.

    Raises:
        BuildError: there is no compiler, it fails, or its result cannot be loaded.
    """
    try:
        command = [*_compiler(), *COMPILE_FLAGS, *variant.compile_flags, *extra_flags]
        name = f"{variant.name}-{_digest(command)}.so"
        with _compiled(command, name) as path:
            return Library(path)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise BuildError(f"the native kernels cannot be compiled or loaded: {error}") from error


@contextmanager
def _compiled(command: Sequence[str], name: str) -> Iterator[Path]:
    """The path of a library until it is loaded: in the cache, or in a directory that is then removed."""
    folder = cache_dir()
    if folder is not None and _is_whole(folder / name):
        yield folder / name
    elif folder is not None and os.access(folder, os.W_OK):
        with (folder / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _is_whole(folder / name):
                _compile(command, folder / name)
        yield folder / name
    else:
        with tempfile.TemporaryDirectory(prefix="naiad-native-") as temporary:
            _compile(command, Path(temporary) / name)
            yield Path(temporary) / name


def _compiler() -> list[str]:
    """The C++ compiler and its first arguments: the environment's `CXX`, or the first that is installed.

    Raises:
        BuildError: none is installed.
    """
    named = shlex.split(os.environ.get("CXX", ""))
    for words in [named] if named else [[name] for name in _COMPILERS]:
        path = shutil.which(words[0])
        if path is not None:
            return [path, *words[1:]]
    raise BuildError(
        f"no C++ compiler is installed (looked for {named[0] if named else ', '.join(_COMPILERS)})"
    )


def cache_dir() -> Path | None:
    """The directory of compiled kernels, which belongs to this user alone; None if there can be none."""
    return private_folder("native")


def _digest(command: Sequence[str]) -> str:
    """Of everything that decides what the compiler makes."""
    run = subprocess.run([command[0], "--version"], capture_output=True, timeout=_TIMEOUT_S, check=False)
    digest = hashlib.sha256(run.stdout + "\0".join(command).encode())
    for path in sorted(SOURCE_DIR.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _compile(command: Sequence[str], library: Path) -> None:
    """Compile beside the library's place and put it there in one move, and its checksum after it."""
    part = library.with_suffix(f".{os.getpid()}.part")
    sources = sorted(str(path) for path in SOURCE_DIR.glob("*.cpp"))
    try:
        whole = [*command, *sources, "-o", str(part)]
        run = subprocess.run(
            whole, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S, check=False
        )
        if run.returncode != 0:
            raise BuildError(f"{command[0]} failed: {run.stderr.strip()[-2000:]}")
        checksum = _checksum(part)
        part.replace(library)
        part.write_text(checksum)
        part.replace(_checksum_path(library))
    finally:
        part.unlink(missing_ok=True)


def _is_whole(library: Path) -> bool:
    """Whether the library is there as it was compiled: a disk may have been full, or the power gone."""
    try:
        return _checksum(library).encode() == _checksum_path(library).read_bytes()
    except OSError:
        return False


def _checksum(library: Path) -> str:
    return hashlib.sha256(library.read_bytes()).hexdigest()


def _checksum_path(library: Path) -> Path:
    return library.with_suffix(".sha256")
