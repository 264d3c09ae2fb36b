from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from perf.engine.start import _row, measure_starts

from helpers.tiny_repository import tiny_checkpoint
from naiad_kernels.native.variants import best_variant


@pytest.mark.skipif(best_variant() is None, reason="this CPU has no AVX2")
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_starts_are_measured_in_phases(tmp_path: Path, quantization: str) -> None:
    checkpoint = tiny_checkpoint(tmp_path)
    settings = {"dtype": "float32", "quantization": quantization, "drafter": "none", "repeats": 1}
    starts = measure_starts(checkpoint, argparse.Namespace(**settings))
    assert [start["start"] for start in starts] == ["without cache", "first", "later 1"]
    assert starts[0]["ids"] == starts[1]["ids"] == starts[2]["ids"]
    for start in starts:
        row = _row(start)
        phases = [
            value
            for name, value in row.items()
            if name not in ("start", "total s", "loading MiB", "of packed")
        ]
        assert row["total s"] == pytest.approx(sum(phases), abs=0.05)
        assert min(start["seconds"].values()) >= 0
        assert start["packed_bytes"] > 0
    assert ["measuring" in start["seconds"] for start in starts] == [True, True, False]
