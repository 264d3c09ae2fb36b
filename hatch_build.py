"""Hatchling's hook: a wheel brings the native kernels, compiled for every instruction set."""

from __future__ import annotations

import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class PrebuiltKernels(BuildHookInterface):  # type: ignore[type-arg]
    """Compiles the kernels, and names the platform that they run on in the wheel's tag.

    A wheel that is built on another architecture, or without a C++ compiler, is a pure one. A checkout, which
    is installed in place, compiles what it needs at the first start.
    """

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the libraries to the wheel."""
        if version == "editable":
            return
        sys.path.insert(0, str(Path(self.root) / "kernels"))
        from naiad_kernels.native.build import NoCompilerError
        from naiad_kernels.native.prebuilt import compile_variants, needed_glibc

        if (sys.platform, platform.machine()) != ("linux", "x86_64"):
            self.app.display_warning(f"no native kernels are built for {platform.machine()}: torch computes")
            return
        self._folder = tempfile.TemporaryDirectory(prefix="naiad-wheel-")
        try:
            libraries = compile_variants(Path(self._folder.name))
        except NoCompilerError as error:
            self.app.display_warning(f"the wheel has no native kernels: {error}")
            return
        major, minor = needed_glibc(libraries)
        build_data["tag"] = f"py3-none-manylinux_{major}_{minor}_x86_64"
        build_data["pure_python"] = False
        for path in libraries:
            build_data["force_include"][str(path)] = f"naiad_kernels/native/prebuilt/{path.name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what has been compiled."""
        if hasattr(self, "_folder"):
            self._folder.cleanup()
