"""A wheel brings the kernels compiled, for machines without a compiler."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from naiad_kernels.native import build
from naiad_kernels.native.build import BuildError, Origin, find, library_name, load
from naiad_kernels.native.prebuilt import compile_variants, needed_glibc
from naiad_kernels.native.variants import VARIANTS, Variant, best_variant

ROOT = Path(__file__).parents[2]
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-q")


@pytest.fixture
def prebuilt(small: Variant, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Small libraries where a wheel has the whole ones, and no compiler."""
    build.PREBUILT_DIR.mkdir()
    made = compile_variants(build.PREBUILT_DIR)
    monkeypatch.setenv("CXX", "no-such-compiler")
    return made


def test_a_prebuilt_library_needs_no_compiler_and_no_cache(prebuilt: list[Path], tmp_path: Path) -> None:
    assert len(prebuilt) == len(VARIANTS)
    for variant in VARIANTS:
        assert find(variant).origin is Origin.PREBUILT
        load(variant)
    assert not (tmp_path / "cache").exists()


def test_a_prebuilt_library_of_other_sources_is_not_used(prebuilt: list[Path]) -> None:
    (build.SOURCE_DIR / "one.h").write_text("// more\n")
    with pytest.raises(BuildError, match=r"no C\+\+ compiler"):
        load(VARIANTS[0])


@pytest.mark.slow
@pytest.mark.skipif(best_variant() is None, reason="this CPU has no AVX2")
def test_an_installed_wheel_runs_without_a_compiler(tmp_path: Path) -> None:
    offline = ("--no-deps", "--no-index")
    wheels, site = tmp_path / "wheels", tmp_path / "site"
    command = (*PIP, "wheel", *offline, "--no-build-isolation", "-w", str(wheels), str(ROOT))
    subprocess.run(command, check=True)
    (wheel,) = wheels.iterdir()
    assert wheel.name.split("-")[2:4] == ["py3", "none"]
    major, minor = wheel.name.split("manylinux_")[1].split("_")[:2]
    names = zipfile.ZipFile(wheel).namelist()
    for variant in VARIANTS:
        name = library_name(variant, (*build.COMPILE_FLAGS, *variant.compile_flags))
        assert f"naiad_kernels/native/prebuilt/{name}.so" in names
    subprocess.run((*PIP, "install", *offline, "--target", str(site), str(wheel)), check=True)
    assert (int(major), int(minor)) == needed_glibc(list(site.glob("naiad_kernels/native/prebuilt/*.so")))
    code = (
        "from naiad_kernels.native import build, variants\n"
        "build.load(variants.best_variant()).new_team(2)\n"
        "print(*[line.split()[-1] for line in open('/proc/self/maps') if 'avx' in line])\n"
    )
    empty = str(tmp_path / "empty")
    environment = {"PATH": empty, "PYTHONPATH": str(site), "XDG_CACHE_HOME": empty}
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    loaded = {Path(path).parent for path in run.stdout.split()}
    assert loaded == {site / "naiad_kernels" / "native" / "prebuilt"}
    assert not Path(empty).exists()
