"""Get a variant of the native kernels: prebuilt in a wheel, from the cache, or compiled on this machine."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from naiad_kernels.native.cache import LibraryCache
from naiad_kernels.native.library import Library
from naiad_kernels.native.variants import Variant

SOURCE_DIR = Path(__file__).parent / "src"
# Only a wheel has it.
PREBUILT_DIR = Path(__file__).parent / "prebuilt"
# Nothing is contracted to FMAs behind the source's back: all variants have to give the same bits. Warnings
# are errors in the tests only: a compiler that warns of something new must not cost a machine the kernels.
COMPILE_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-pthread",
    "-fno-math-errno",
    "-ffp-contract=off",
    "-fvisibility=hidden",
)
_COMPILERS = ("g++", "clang++", "c++")
_TIMEOUT_S = 300


class BuildError(Exception):
    """The kernels cannot be had here; the text says why."""


class NoCompilerError(BuildError):
    """No C++ compiler is installed."""


def load(variant: Variant, extra_flags: Sequence[str] = ()) -> Library:
    """Load a variant's library: the prebuilt one, else one of the cache, else compile it.

    A library that the cache has from these sources is found without a compiler too.

    Args:
        variant: how to compile.
        extra_flags: of the compiler, after all others.

    Raises:
        BuildError: there is no compiler, it fails, or its result cannot be loaded.
    """
    flags = (*COMPILE_FLAGS, *variant.compile_flags, *extra_flags)
    try:
        name = library_name(variant, flags)
        prebuilt = PREBUILT_DIR / f"{name}.so"
        if prebuilt.exists():
            return Library(prebuilt)
        return _compiled(name, flags)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise BuildError(f"the native kernels cannot be compiled or loaded: {error}") from error


def library_name(variant: Variant, flags: Sequence[str]) -> str:
    """Return the name of the library compiled with these flags, without compiler and suffix."""
    digest = hashlib.sha256("\0".join(flags).encode())
    for path in [*sorted(SOURCE_DIR.glob("*.h")), *source_paths()]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return f"{variant.name}-{digest.hexdigest()[:16]}"


def source_paths() -> list[Path]:
    """The files that are compiled."""
    return sorted(SOURCE_DIR.glob("*.cpp"))


def compiler() -> list[str]:
    """The C++ compiler and its first arguments: the environment's `CXX`, or the first that is installed.

    Raises:
        NoCompilerError: none is installed.
    """
    named = shlex.split(os.environ.get("CXX", ""))
    for words in [named] if named else [[name] for name in _COMPILERS]:
        path = shutil.which(words[0])
        if path is not None:
            return [path, *words[1:]]
    raise NoCompilerError(
        f"no C++ compiler is installed (looked for {named[0] if named else ', '.join(_COMPILERS)})"
    )


def compile_library(command: Sequence[str], library: Path) -> None:
    """Compile the sources side by side, and link them.

    Args:
        command: the compiler and its flags.
        library: the path of the result.

    Raises:
        BuildError: the compiler fails, or takes too long.
    """
    with tempfile.TemporaryDirectory(prefix="naiad-native-") as folder, ThreadPoolExecutor() as pool:
        objects = [Path(folder, f"{source.stem}.o") for source in source_paths()]
        pairs = zip(source_paths(), objects, strict=True)
        compiles = [[*command, "-c", str(source), "-o", str(made)] for source, made in pairs]
        list(pool.map(_run, compiles))
        _run([*command, "-shared", *map(str, objects), "-o", str(library)])


def _run(command: Sequence[str]) -> None:
    try:
        run = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{command[0]} took more than {_TIMEOUT_S} s") from error
    if run.returncode != 0:
        raise BuildError(f"{command[0]} failed: {run.stderr.strip()[-2000:]}")


def _compiled(name: str, flags: Sequence[str]) -> Library:
    """Load a library from the cache, or compile it and keep it there if that is possible."""
    cache = LibraryCache.of_user()
    try:
        command = compiler()
    except NoCompilerError:
        found = cache.load(f"{name}-*", Library) if cache else None
        if found is None:
            raise
        return found
    name = f"{name}-{_toolchain_digest(command)}"
    found = cache.load(name, Library) if cache else None
    if found is not None:
        return found
    command += flags
    with tempfile.TemporaryDirectory(prefix="naiad-native-") as temporary:
        made = Path(temporary) / f"{name}.so"

        def build(path: Path) -> None:
            compile_library(command, made)
            shutil.copyfile(made, path)

        if cache is not None and cache.is_writable:
            # A full disk keeps the library from being kept, and not from being used.
            with suppress(OSError):
                return cache.add(name, build, Library)
        if not made.exists():
            compile_library(command, made)
        return Library(made)


def _toolchain_digest(command: Sequence[str]) -> str:
    """Return a digest of what decides the result besides sources and flags.

    That is the compiler, which `command` may name after a program that calls it, its options, and the C
    library that the result is linked with.
    """
    run = subprocess.run([*command, "--version"], capture_output=True, timeout=_TIMEOUT_S, check=False)
    words = [*command, *platform.libc_ver()]
    return hashlib.sha256(run.stdout + "\0".join(words).encode()).hexdigest()[:16]
