"""How the native kernels get onto a machine, and what happens where they cannot."""

from __future__ import annotations

import logging
import os
import platform
import subprocess
from pathlib import Path

import pytest
import torch

from helpers.native_compiler import knows
from helpers.tape_file import REPLAY_SOURCE
from helpers.tiny_models import make_tiny_model
from naiad.config import EngineConfig
from naiad.errors import ConfigError
from naiad.model_runner import ModelRunner, native_kernels
from naiad.models.native_model import NativeModel
from naiad_kernels.native import build as build_module
from naiad_kernels.native import variants
from naiad_kernels.native.build import COMPILE_FLAGS, BuildError, compiler, load, source_paths
from naiad_kernels.native.variants import PORTABLE, PORTABLE_AMX, VARIANTS, Variant, best_variant

WARNINGS = ("-Wall", "-Wextra", "-Werror", "-fsyntax-only", "-O0")


@pytest.mark.parametrize("variant", [*VARIANTS, PORTABLE, PORTABLE_AMX], ids=lambda each: each.name)
def test_the_source_has_no_warnings(variant: Variant) -> None:
    """All variants compile everywhere, whatever this CPU can run."""
    if not knows(variant):
        pytest.skip(f"the compiler is too old for {' '.join(variant.compile_flags)}")
    sources = [*map(str, source_paths()), str(REPLAY_SOURCE)]
    command = [*compiler(), *COMPILE_FLAGS, *variant.compile_flags, *WARNINGS, *sources]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


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


@pytest.mark.skipif(best_variant() is None, reason="this CPU has no AVX2")
def test_a_variant_that_the_compiler_does_not_know_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    unknown = Variant("future", ("-mno-such-instructions",), frozenset())
    monkeypatch.setattr(native_kernels, "usable_variants", lambda: iter([unknown, best_variant()]))
    with caplog.at_level(logging.WARNING):
        assert is_native(make_runner(tmp_path))
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "kernels compute the steps, not the fastest ones" in line
    assert "-mno-such-instructions" in line


def test_without_a_compiler_torch_computes_and_one_line_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
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
    with pytest.raises(ConfigError, match=r"^kv_cache_dtype = 'bfloat16': expected auto, int8 or fp8, or f"):
        make_runner(tmp_path, dtype="float32", kv_cache_dtype="bfloat16")
    core = str(min(os.sched_getaffinity(0)))
    with pytest.raises(ConfigError, match=r"^cpu_affinity = '\d+': expected no cores: torch computes"):
        make_runner(tmp_path, cpu_affinity=core)


def test_a_kv_cache_in_fp8_is_torchs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        runner = make_runner(tmp_path, kv_cache_dtype="fp8")
    assert not is_native(runner)
    assert "they have no KV cache in fp8" in caplog.text
    assert runner._pool.layers[0].key.dtype == torch.float8_e4m3fn
    with pytest.raises(ConfigError, match=r"^cpu_kernels = 'native': expected auto or torch: .* fp8"):
        make_runner(tmp_path, kv_cache_dtype="fp8", cpu_kernels="native")


def test_another_cpu_is_torchs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(variants, "cpu_flags", lambda: frozenset())
    with caplog.at_level(logging.WARNING):
        assert not is_native(make_runner(tmp_path))
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert line.endswith(f"this CPU ({platform.machine()}) has no AVX2")


def test_other_dtypes_are_torchs(tmp_path: Path) -> None:
    assert not is_native(make_runner(tmp_path, dtype="float16"))
    with pytest.raises(ConfigError, match=rf"float32 and bfloat16, not in {torch.float16}"):
        make_runner(tmp_path, dtype="float16", cpu_kernels="native")
