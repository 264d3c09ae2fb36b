from __future__ import annotations

import ctypes
import os
from pathlib import Path
from shutil import which

import pytest

from naiad_kernels.native import build
from naiad_kernels.native.build import load
from naiad_kernels.native.library import STRUCTS, Library, Team
from naiad_kernels.native.variants import PORTABLE, PORTABLE_AMX, VARIANTS, Variant

HERE = [each for each in (*VARIANTS, PORTABLE, PORTABLE_AMX) if each.runs_here]
# What `Library` looks for, and nothing else.
_SIZES = ", ".join(str(ctypes.sizeof(each)) for each in STRUCTS)
_SMALL_SOURCE = f"""
#include <cstdint>
#define API __attribute__((visibility("default")))
const int64_t kSizes[] = {{{_SIZES}}};
const int kCount = {len(STRUCTS)};
extern "C" API void* naiad_team_new(int64_t) {{ return nullptr; }}
extern "C" API void naiad_team_free(void*) {{}}
extern "C" API void naiad_team_pin() {{}}
extern "C" API void naiad_team_adapt() {{}}
extern "C" API void naiad_team_size() {{}}
extern "C" API void naiad_team_lose_share() {{}}
extern "C" API int naiad_run() {{ return 0; }}
extern "C" API void naiad_sizes(int64_t* sizes) {{ for (int i = 0; i < kCount; i++) sizes[i] = kSizes[i]; }}
"""


@pytest.fixture(scope="session", autouse=True)
def _compiler() -> None:
    """Where there is no compiler torch computes the steps, and there is nothing to test here."""
    if not any(map(which, (os.environ.get("CXX", "g++"), "g++", "clang++", "c++"))):
        pytest.skip("no C++ compiler is installed")


@pytest.fixture(scope="session", params=HERE, ids=lambda variant: variant.name)
def library(request: pytest.FixtureRequest) -> Library:
    """Every variant that this machine runs, the portable twins among them."""
    return load(request.param)


@pytest.fixture(scope="session")
def team(library: Library) -> Team:
    """More threads than a small record has work for."""
    return library.new_team(3)


@pytest.fixture(scope="session")
def portable(library: Library) -> Team:
    """The twin whose bits the variant has to give."""
    return load(PORTABLE_AMX if "amx" in library.name else PORTABLE).new_team(1)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Variant:
    """A variant that compiles at once, with a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = tmp_path / "src"
    source.mkdir()
    (source / "one.cpp").write_text(_SMALL_SOURCE)
    monkeypatch.setattr(build, "SOURCE_DIR", source)
    return PORTABLE
