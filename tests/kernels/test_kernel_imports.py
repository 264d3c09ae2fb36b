from __future__ import annotations

import pkgutil
import subprocess
import sys

import naiad_kernels

OPS = [module.name for module in pkgutil.iter_modules(naiad_kernels.__path__)]


def test_ops_are_imported_without_a_compiler() -> None:
    assert "paged_attention" in OPS
    imports = ", ".join(f"naiad_kernels.{name}" for name in OPS)
    program = f"import sys, {imports}; print('triton' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
