"""Kernels that compute nothing, for tests of where a library comes from."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from naiad_kernels.native import build
from naiad_kernels.native.library import STRUCTS

# What `Library` looks for, and nothing else.
_SIZES = ", ".join(str(ctypes.sizeof(each)) for each in STRUCTS)
_SOURCE = f"""
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


def use_small_kernels(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let `build` have sources that compile at once, with a cache of their own and nothing prebuilt."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    monkeypatch.setattr(build, "PREBUILT_DIR", folder / "prebuilt")
    source = folder / "src"
    source.mkdir()
    (source / "one.cpp").write_text(_SOURCE)
    monkeypatch.setattr(build, "SOURCE_DIR", source)
