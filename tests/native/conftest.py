from __future__ import annotations

import os
from pathlib import Path
from shutil import which

import pytest

from helpers.small_kernels import use_small_kernels
from naiad_kernels.native.build import load
from naiad_kernels.native.library import Library, Team
from naiad_kernels.native.variants import PORTABLE, PORTABLE_AMX, VARIANTS, Variant

HERE = [each for each in (*VARIANTS, PORTABLE, PORTABLE_AMX) if each.runs_here]


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
    use_small_kernels(monkeypatch, tmp_path)
    return PORTABLE
