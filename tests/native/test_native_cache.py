"""Compiled libraries are kept, found and removed; the compiler is a script that counts its calls."""

from __future__ import annotations

import errno
import hashlib
import itertools
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import textwrap
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest

from naiad_kernels.native import build, cache
from naiad_kernels.native.build import BuildError, NoCompilerError, Origin, compiler, find, load
from naiad_kernels.native.cache import LibraryCache
from naiad_kernels.native.library import Library
from naiad_kernels.native.variants import Variant

LOCKS = {"lock", "building"}


@dataclass(frozen=True, slots=True)
class FakeCompiler:
    """A script that copies a library that has been compiled before."""

    path: Path
    calls: Path

    @property
    def num_compiled(self) -> int:
        """Libraries that it has linked."""
        calls = self.calls.read_text().splitlines() if self.calls.exists() else []
        return sum("-shared" in call.split() for call in calls)


@pytest.fixture(scope="session")
def small_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("small") / "small.so"


@pytest.fixture
def fake(
    small: Variant, small_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> FakeCompiler:
    if not small_library.exists():
        source = build.SOURCE_DIR / "one.cpp"
        subprocess.run([*compiler(), "-shared", "-fPIC", str(source), "-o", str(small_library)], check=True)
    made = FakeCompiler(tmp_path / "fake-c++", tmp_path / "calls")
    made.path.write_text(
        textwrap.dedent(f"""\
        #!/bin/sh
        case "$1" in --version) echo 1; exit;; esac
        echo "$@" >> {made.calls}
        for word; do last=$word; done
        cp {small_library} "$last"
        """)
    )
    made.path.chmod(0o755)
    monkeypatch.setenv("CXX", str(made.path))
    return made


def folder() -> Path:
    found = LibraryCache.of_user()
    assert found is not None
    return found.folder


def libraries() -> list[Path]:
    return sorted(folder().glob("*.so"))


def test_a_library_is_compiled_once_into_a_directory_of_ones_own(small: Variant, fake: FakeCompiler) -> None:
    for _ in range(2):
        load(small)
    assert fake.num_compiled == 1
    assert folder().stat().st_mode & 0o777 == 0o700
    (library,) = libraries()
    left = {path.name for path in folder().iterdir()}
    assert left == {library.name, library.with_suffix(".sha256").name, *LOCKS}


def test_who_loads_a_library_does_not_wait_while_another_is_built(small: Variant, fake: FakeCompiler) -> None:
    load(small)
    (library,) = libraries()
    cache = LibraryCache.of_user()
    assert cache is not None
    has_begun, may_end = threading.Event(), threading.Event()
    done: list[str] = []

    def build_another(path: Path) -> None:
        has_begun.set()
        may_end.wait(30)
        done.append("built")
        path.write_bytes(b"another")

    builder = threading.Thread(target=cache.add, args=("another", build_another, lambda _: None))
    builder.start()
    try:
        assert has_begun.wait(30)
        assert cache.load(library.stem, lambda path: path) == library
        assert done == []
    finally:
        may_end.set()
        builder.join()
    assert [path.stem for path in libraries()] == sorted(["another", library.stem])


def test_another_source_flag_or_compiler_is_another_library(small: Variant, fake: FakeCompiler) -> None:
    load(small)
    load(small, ["-O1"])
    (build.SOURCE_DIR / "one.cpp").write_text("// another\n")
    load(small)
    (build.SOURCE_DIR / "one.h").write_text("// more\n")
    load(small)
    fake.path.write_text(fake.path.read_text().replace("echo 1", "echo 2"))
    load(small)
    assert fake.num_compiled == len(libraries()) == 5


def test_a_compiled_library_is_found_without_a_compiler(
    small: Variant, fake: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(small)
    monkeypatch.setenv("CXX", "no-such-compiler")
    load(small)
    assert fake.num_compiled == 1
    (build.SOURCE_DIR / "one.cpp").write_text("// another\n")
    with pytest.raises(BuildError, match=r"^no C\+\+ compiler is installed \(looked for no-such-compiler\)$"):
        load(small)


def test_what_a_start_gets_is_found_without_compiling(
    small: Variant, fake: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = find(small)
    assert (found.origin, found.library, found.is_kept) == (Origin.COMPILED, None, True)
    assert not libraries()
    load(small)
    assert fake.num_compiled == 1
    for compiler_here in (str(fake.path), "no-such-compiler"):
        monkeypatch.setenv("CXX", compiler_here)
        found = find(small)
        assert found.library is not None
        assert (found.origin, found.library.name) == (Origin.CACHED, libraries()[0].name)
    (build.SOURCE_DIR / "one.cpp").write_text("// another\n")
    with pytest.raises(NoCompilerError):
        find(small)
    assert fake.num_compiled == 1


def test_a_cache_on_a_full_disk_does_not_cost_the_kernels(
    small: Variant, fake: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copy(_: Path, path: Path) -> None:
        path.write_bytes(b"a part")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(build.shutil, "copyfile", copy)
    for num_compiled in (1, 2):
        load(small)
        assert fake.num_compiled == num_compiled
        assert {path.name for path in folder().iterdir()} == LOCKS


@pytest.mark.parametrize("damage", [b"", b"\x7fELF" + bytes(100)], ids=["empty", "cut"])
def test_a_damaged_library_is_compiled_again(small: Variant, fake: FakeCompiler, damage: bytes) -> None:
    load(small)
    (library,) = libraries()
    # What this process has mapped must stay as it is.
    library.unlink()
    library.write_bytes(damage)
    load(small)
    assert fake.num_compiled == 2
    assert len(library.read_bytes()) > len(damage)


@pytest.fixture
def afresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let every load read its file: the system does not open a path again that this process has loaded."""
    numbers = itertools.count()

    def load_copy(path: Path) -> Library:
        return Library(Path(shutil.copyfile(path, tmp_path / f"{next(numbers)}.so")))

    monkeypatch.setattr(build, "Library", load_copy)


def spoil(library: Path) -> None:
    """Replace a library by a whole file that cannot be loaded, as one for another C library is."""
    data = b"of another machine"
    library.write_bytes(data)
    library.with_suffix(".sha256").write_text(hashlib.sha256(data).hexdigest())


@pytest.mark.usefixtures("afresh")
def test_a_library_that_cannot_be_loaded_here_is_compiled_again(small: Variant, fake: FakeCompiler) -> None:
    load(small)
    (library,) = libraries()
    spoil(library)
    for _ in range(2):
        load(small)
    assert fake.num_compiled == 2


@pytest.mark.usefixtures("afresh")
def test_a_library_that_cannot_be_loaded_here_is_passed_over_without_a_compiler(
    small: Variant, fake: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(small)
    (good,) = libraries()
    os.utime(good, (1, 1))
    fake.path.write_text(fake.path.read_text().replace("echo 1", "echo 2"))
    load(small)
    (other,) = set(libraries()) - {good}
    spoil(other)
    monkeypatch.setenv("CXX", "no-such-compiler")
    load(small)
    good.unlink()
    with pytest.raises(BuildError, match=r"no C\+\+ compiler is installed"):
        load(small)


def test_what_cannot_be_loaded_as_soon_as_it_is_compiled_is_not_compiled_again(
    small: Variant, fake: FakeCompiler, small_library: Path
) -> None:
    fake.path.write_text(fake.path.read_text().replace(f"cp {small_library}", "echo nothing >"))
    with pytest.raises(BuildError, match="cannot be compiled or loaded"):
        load(small)
    assert fake.num_compiled == 1


def test_another_c_library_is_another_library(
    small: Variant, fake: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(small)
    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", "2.0"))
    load(small)
    assert fake.num_compiled == len(libraries()) == 2


def test_the_compiler_behind_another_program_counts(
    small: Variant, fake: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in `CXX="ccache g++"`."""
    monkeypatch.setenv("CXX", f"env {fake.path}")
    load(small)
    fake.path.write_text(fake.path.read_text().replace("echo 1", "echo 2"))
    load(small)
    assert fake.num_compiled == len(libraries()) == 2


def test_the_libraries_used_last_are_kept(
    small: Variant, fake: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "MOST_LIBRARIES", 2)
    load(small, ["-D1"])
    (first,) = libraries()
    os.utime(first, (0, 0))
    load(small, ["-D2"])
    (second,) = set(libraries()) - {first}
    os.utime(second, (1, 1))
    load(small, ["-D1"])
    (folder() / "left.part").touch()
    load(small, ["-D3"])
    assert first in libraries()
    assert second not in libraries()
    assert len(libraries()) == len(list(folder().glob("*.sha256"))) == 2
    assert not list(folder().glob("*.part"))


def test_processes_that_start_together_compile_once(small: Variant, fake: FakeCompiler) -> None:
    fake.path.write_text(fake.path.read_text().replace("for word", "sleep 0.3\nfor word"))
    code = f"""
        from pathlib import Path
        from naiad_kernels.native import build, variants
        build.SOURCE_DIR = Path({str(build.SOURCE_DIR)!r})
        build.load(variants.PORTABLE)
    """
    children = [subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)]) for _ in range(4)]
    assert [child.wait(60) for child in children] == [0] * 4
    assert fake.num_compiled == 1


def test_a_directory_that_others_could_write_is_replaced(small: Variant, fake: FakeCompiler) -> None:
    load(small)
    folder().chmod(0o777)
    assert libraries() == []
    assert folder().stat().st_mode & 0o777 == 0o700
    load(small)
    assert fake.num_compiled == 2


def test_a_directory_that_others_could_read_is_kept(small: Variant, fake: FakeCompiler) -> None:
    load(small)
    folder().chmod(0o755)
    load(small)
    assert fake.num_compiled == 1
    assert folder().stat().st_mode & 0o777 == 0o700


def test_a_link_is_not_followed(small: Variant, fake: FakeCompiler, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "cache" / "naiad").mkdir(parents=True)
    (tmp_path / "cache" / "naiad" / "native").symlink_to(tmp_path / "elsewhere")
    assert LibraryCache.of_user() is None
    load(small)
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_cache_that_cannot_be_written_is_read(
    small: Variant, fake: FakeCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may write a read-only directory, but nobody opens a directory as the lock."""
    load(small)
    lock = folder() / "lock"
    lock.unlink()
    lock.mkdir()
    load(small)
    assert fake.num_compiled == 1
    assert_leaves_nothing(small, tmp_path, monkeypatch)
    assert fake.num_compiled == 2
    assert len(libraries()) == 1


def test_nothing_is_left_where_there_is_no_cache(
    small: Variant, fake: FakeCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a_file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a_file"))
    assert_leaves_nothing(small, tmp_path, monkeypatch)
    assert fake.num_compiled == 1


def assert_leaves_nothing(variant: Variant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Load a library that no cache has yet, by way of a temporary directory."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    load(variant, ["-DANOTHER"])
    assert not list((tmp_path / "temporary").iterdir())
