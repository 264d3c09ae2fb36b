"""Get a variant of the native kernels: prebuilt in a wheel, from the cache, or compiled on this machine."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TypeVar

from naiad_kernels.native.cache import LibraryCache
from naiad_kernels.native.library import Library
from naiad_kernels.native.variants import Variant

_Got = TypeVar("_Got")
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


class Origin(Enum):
    """Where a library comes from."""

    PREBUILT = "prebuilt"
    CACHED = "cached"
    COMPILED = "compiled"


@dataclass(frozen=True, slots=True)
class Found:
    """What a start on this machine gets for a variant.

    Attributes:
        variant: which.
        origin: where its library comes from.
        library: the library; None if it has yet to be compiled.
        name: of the library, without its suffix.
        cache: where libraries are kept; None: nowhere.
        command: the compiler with its flags; empty if none is needed.
    """

    variant: Variant
    origin: Origin
    library: Library | None
    name: str
    cache: LibraryCache | None = None
    command: tuple[str, ...] = ()

    @property
    def is_kept(self) -> bool:
        """Whether the next start has no need to compile."""
        return self.library is not None or (self.cache is not None and self.cache.is_writable)


def find(variant: Variant, extra_flags: Sequence[str] = ()) -> Found:
    """Load a variant's library if it is prebuilt or in the cache; compile nothing.

    A library that the cache has from these sources is found without a compiler too.

    Args:
        variant: how it is compiled.
        extra_flags: of the compiler, after all others.

    Raises:
        BuildError: the prebuilt library cannot be loaded, or there is none, nor one in the cache, nor a
            compiler.
    """
    flags = (*COMPILE_FLAGS, *variant.compile_flags, *extra_flags)
    with _build_errors():
        name = library_name(variant, flags)
        prebuilt = PREBUILT_DIR / f"{name}.so"
        if prebuilt.exists():
            return Found(variant, Origin.PREBUILT, Library(prebuilt), name)
        cache = LibraryCache.of_user()
        try:
            command = compiler()
        except NoCompilerError:
            library = cache.load(f"{name}-*", Library) if cache else None
            if library is None:
                raise
            return Found(variant, Origin.CACHED, library, name, cache)
        name = f"{name}-{_toolchain_digest(command)}"
        library = cache.load(name, Library) if cache else None
        origin = Origin.COMPILED if library is None else Origin.CACHED
        return Found(variant, origin, library, name, cache, (*command, *flags))


def load(variant: Variant, extra_flags: Sequence[str] = ()) -> Library:
    """Load what `find` finds, compiled if it has yet to be.

    Args:
        variant: how to compile.
        extra_flags: of the compiler, after all others.

    Raises:
        BuildError: there is no compiler, it fails, or its result cannot be loaded.
    """
    found = find(variant, extra_flags)
    if found.library is not None:
        return found.library
    with _build_errors():
        return _compiled(found)


def first_of(variants: Iterable[Variant], get: Callable[[Variant], _Got]) -> tuple[_Got, BuildError | None]:
    """The first variant that can be had here.

    Args:
        variants: that this CPU runs, the fastest first.
        get: `load`, or `find` to learn what it would load.

    Returns:
        What `get` returns, and why a faster variant cannot be had if there is one.

    Raises:
        BuildError: none can be had; the text says why the fastest cannot.
    """
    problem: BuildError | None = None
    for variant in variants:
        try:
            return get(variant), problem
        except BuildError as error:
            problem = problem or error
    raise problem or BuildError(f"this CPU ({platform.machine()}) has no AVX2")


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


def _compiled(found: Found) -> Library:
    """Compile a library, unless another process was faster, and keep it if that is possible."""
    cache = found.cache
    with tempfile.TemporaryDirectory(prefix="naiad-native-") as temporary:
        made = Path(temporary) / f"{found.name}.so"

        def build(path: Path) -> None:
            compile_library(found.command, made)
            shutil.copyfile(made, path)

        if cache is not None and cache.is_writable:
            # A full disk keeps the library from being kept, and not from being used.
            with suppress(OSError):
                return cache.add(found.name, build, Library)
        if not made.exists():
            compile_library(found.command, made)
        return Library(made)


@contextmanager
def _build_errors() -> Iterator[None]:
    """Tell whatever keeps a library from being compiled or loaded as a `BuildError`."""
    try:
        yield
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise BuildError(f"the native kernels cannot be compiled or loaded: {error}") from error


def _toolchain_digest(command: Sequence[str]) -> str:
    """Return a digest of what decides the result besides sources and flags.

    That is the compiler, which `command` may name after a program that calls it, its options, and the C
    library that the result is linked with.
    """
    run = subprocess.run([*command, "--version"], capture_output=True, timeout=_TIMEOUT_S, check=False)
    words = [*command, *platform.libc_ver()]
    return hashlib.sha256(run.stdout + "\0".join(words).encode()).hexdigest()[:16]
