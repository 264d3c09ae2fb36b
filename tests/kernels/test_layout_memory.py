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
    assert shares.keys() == {"none", "int8", "int4"}
    assert max(shares.values()) < 1.6, shares
