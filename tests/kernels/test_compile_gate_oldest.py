"""The compile gate with the oldest triton, apart from it so that both run side by side."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from perf.compile_gate.compiled import OLDEST_TRITON

GATE = Path(__file__).with_name("test_compile_gate.py")


@pytest.mark.slow
def test_the_oldest_triton_compiles_all_of_it_too(tmp_path: Path) -> None:
    """Run the gate with the oldest release that pyproject.toml allows."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path)]
    subprocess.run([*pip, f"triton=={OLDEST_TRITON}"], check=True)
    pytest_ = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(GATE)]
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    ran = subprocess.run(pytest_, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-4000:]
