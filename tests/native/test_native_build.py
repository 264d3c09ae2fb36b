"""How the native kernels get onto a machine, and what happens where they cannot."""

from __future__ import annotations

import ctypes
import logging
import os
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch

from helpers.tiny_models import make_tiny_model
from naiad.config import EngineConfig
from naiad.errors import ConfigError
from naiad.model_runner import ModelRunner
from naiad.models.native_model import NativeModel
from naiad_kernels.native import build as build_module
from naiad_kernels.native.build import COMPILE_FLAGS, SOURCE_DIR, BuildError, _compiler, cache_dir, load
from naiad_kernels.native.library import Cache, Matrix, Record, Step
from naiad_kernels.native.variants import PORTABLE, VARIANTS, Variant, best_variant

# What `Library` looks for, and nothing else.
_SIZES = ", ".join(str(ctypes.sizeof(each)) for each in (Record, Matrix, Cache, Step))
SMALL_SOURCE = f"""
#include <cstdint>
#define API __attribute__((visibility("default")))
const int64_t kSizes[] = {{{_SIZES}}};
extern "C" API void* naiad_team_new(int64_t) {{ return nullptr; }}
extern "C" API void naiad_team_free(void*) {{}}
extern "C" API void naiad_team_pin() {{}}
extern "C" API void naiad_team_adapt() {{}}
extern "C" API void naiad_team_size() {{}}
extern "C" API void naiad_team_lose_member() {{}}
extern "C" API int naiad_run() {{ return 0; }}
extern "C" API void naiad_sizes(int64_t* sizes) {{ for (int i = 0; i < 4; i++) sizes[i] = kSizes[i]; }}
"""
WARNINGS = ("-Wall", "-Wextra", "-Werror", "-fsyntax-only", "-O0")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Variant:
    """A variant that compiles at once, with a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = tmp_path / "src"
    source.mkdir()
    (source / "one.cpp").write_text(SMALL_SOURCE)
    monkeypatch.setattr(build_module, "SOURCE_DIR", source)
    return PORTABLE


@pytest.mark.parametrize("variant", [*VARIANTS, PORTABLE], ids=lambda each: each.name)
def test_the_source_has_no_warnings(variant: Variant) -> None:
    """All variants compile everywhere, whatever this CPU can run."""
    sources = sorted(str(path) for path in SOURCE_DIR.glob("*.cpp"))
    command = [*_compiler(), *COMPILE_FLAGS, *variant.compile_flags, *WARNINGS, *sources]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def compiled(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.so"))


def test_a_library_is_compiled_once_into_a_directory_of_ones_own(small: Variant) -> None:
    folder = cache_dir()
    assert folder is not None
    assert folder.stat().st_mode & 0o777 == 0o700
    for _ in range(2):
        load(small)
        (library,) = compiled(folder)
        compiled_at = library.stat().st_mtime_ns
    load(small)
    assert library.stat().st_mtime_ns == compiled_at
    assert not list(folder.glob("*.part"))


def test_another_source_or_flag_is_another_library(small: Variant) -> None:
    folder = cache_dir()
    assert folder is not None
    load(small)
    load(small, ["-O1"])
    (build_module.SOURCE_DIR / "one.cpp").write_text(SMALL_SOURCE + "// more\n")
    load(small)
    assert len(compiled(folder)) == 3


@pytest.mark.parametrize("damage", [b"", b"\x7fELF" + bytes(100)], ids=["empty", "cut"])
def test_a_damaged_library_is_compiled_again(small: Variant, damage: bytes) -> None:
    load(small)
    folder = cache_dir()
    assert folder is not None
    (library,) = compiled(folder)
    library.unlink()
    library.write_bytes(damage)
    load(small)
    assert len(library.read_bytes()) > len(damage)


def test_a_directory_that_others_may_write_is_not_trusted(small: Variant, tmp_path: Path) -> None:
    folder = cache_dir()
    assert folder is not None
    folder.chmod(0o777)
    assert cache_dir() is None
    load(small)
    assert not compiled(folder)


def test_nothing_is_left_where_there_is_no_cache(
    small: Variant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a_file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a_file"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    load(small)
    assert not list((tmp_path / "temporary").iterdir())


def test_a_failing_compiler_is_quoted(small: Variant) -> None:
    (build_module.SOURCE_DIR / "one.cpp").write_text("int one( { return 1; }\n")
    with pytest.raises(BuildError, match=r"failed: .*one\.cpp"):
        load(small)


def test_a_library_that_cannot_be_loaded_is_a_build_error(
    small: Variant, monkeypatch: pytest.MonkeyPatch
) -> None:
    (build_module.SOURCE_DIR / "one.cpp").write_text("int not_there();\nint one() { return not_there(); }\n")
    with pytest.raises(BuildError, match=r"cannot be compiled or loaded: .*undefined symbol"):
        load(small, ["-Wl,-z,now"])
    monkeypatch.setenv("CXX", "/dev/null")
    with pytest.raises(BuildError, match=r"no C\+\+ compiler is installed"):
        load(small)


def test_a_compiler_may_come_with_arguments(small: Variant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "env g++")
    load(small)


def make_runner(directory: Path, **settings: object) -> ModelRunner:
    make_tiny_model(directory)
    config = EngineConfig(
        model_dir=str(directory),
        max_num_batched_tokens=64,
        kv_cache_bytes=1 << 22,
        **{"dtype": "float32", **settings},  # type: ignore[arg-type]
    )
    return ModelRunner(config)


def is_native(runner: ModelRunner) -> bool:
    return isinstance(runner._model, NativeModel)


@pytest.mark.skipif(best_variant() is None, reason="this CPU has no AVX2")
def test_native_kernels_are_used_where_they_can_be(tmp_path: Path) -> None:
    assert is_native(make_runner(tmp_path))
    assert not is_native(make_runner(tmp_path, cpu_kernels="torch"))


def test_without_a_compiler_torch_computes_and_one_line_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with caplog.at_level(logging.WARNING):
        assert not is_native(make_runner(tmp_path))
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert line.startswith("torch computes the steps, slower than the native kernels would: no C++ compiler")
    with pytest.raises(
        ConfigError, match=r"^cpu_kernels = 'native': expected auto or torch: no C\+\+ compiler"
    ):
        make_runner(tmp_path, cpu_kernels="native")
    with pytest.raises(ConfigError, match=r"^quantization = 'int8': expected none: only native .*no C\+\+"):
        make_runner(tmp_path, quantization="int8")
    with pytest.raises(
        ConfigError, match=r"^batch_invariant = True: expected false: torch's products depend"
    ):
        make_runner(tmp_path, batch_invariant=True)
    core = str(min(os.sched_getaffinity(0)))
    with pytest.raises(ConfigError, match=r"^cpu_affinity = '\d+': expected no cores: torch computes"):
        make_runner(tmp_path, cpu_affinity=core)


def test_other_dtypes_are_torchs(tmp_path: Path) -> None:
    assert not is_native(make_runner(tmp_path, dtype="float16"))
    with pytest.raises(ConfigError, match=rf"float32 and bfloat16, not in {torch.float16}"):
        make_runner(tmp_path, dtype="float16", cpu_kernels="native")
