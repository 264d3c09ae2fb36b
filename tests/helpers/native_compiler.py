"""What this machine's C++ compiler can do."""

from __future__ import annotations

import subprocess

from naiad_kernels.native.build import compiler
from naiad_kernels.native.variants import Variant


def knows(variant: Variant) -> bool:
    """Whether it has the instruction sets of a variant."""
    command = [*compiler(), *variant.compile_flags, "-fsyntax-only", "-x", "c++", "/dev/null"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0
