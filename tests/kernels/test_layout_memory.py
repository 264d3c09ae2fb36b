"""Laying out a weight needs little memory beside the weight itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from perf.common.report import ROOT

from helpers import layout_memory_child


def test_laying_out_a_large_weight_needs_little_memory() -> None:
    child = subprocess.run(
        [sys.executable, layout_memory_child.__file__],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    shares = json.loads(child.stdout)
    # The layout itself, of the matrix in 16 bits. A share below it would mean that freed memory was taken.
    least = {"none": 0.95, "int8": 0.5, "int4": 0.28}
    assert shares.keys() == least.keys()
    for quantization, share in shares.items():
        assert least[quantization] < share < 1.6, shares
