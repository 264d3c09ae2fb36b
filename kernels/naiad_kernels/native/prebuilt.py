"""Compile all variants ahead of time, for a wheel: machines that install it need no compiler."""

from __future__ import annotations

import re
from pathlib import Path

from naiad_kernels.native.build import COMPILE_FLAGS, compile_library, compiler, library_name
from naiad_kernels.native.variants import VARIANTS

# A machine may have an older C++ library than the one that compiles, or none. Nothing of it is visible
# outside, because torch brings another.
_LINK_FLAGS = ("-static-libstdc++", "-static-libgcc", "-Wl,--exclude-libs,ALL,--gc-sections", "-s")
_GLIBC = re.compile(rb"GLIBC_(\d+)\.(\d+)")


def compile_variants(folder: Path) -> list[Path]:
    """Compile every variant, whatever this CPU can run.

    Args:
        folder: where the libraries are written.

    Returns:
        Their paths; `load` finds them by their names in `PREBUILT_DIR`.

    Raises:
        NoCompilerError: no C++ compiler is installed.
        BuildError: it fails.
    """
    command = compiler()
    paths = []
    for variant in VARIANTS:
        flags = (*COMPILE_FLAGS, *variant.compile_flags)
        paths.append(folder / f"{library_name(variant, flags)}.so")
        compile_library([*command, *flags, *_LINK_FLAGS], paths[-1])
    return paths


def needed_glibc(libraries: list[Path]) -> tuple[int, int]:
    """The oldest glibc that has every symbol that the libraries use, as its major and minor version."""
    versions = {version for path in libraries for version in _GLIBC.findall(path.read_bytes())}
    return max((int(major), int(minor)) for major, minor in versions)
