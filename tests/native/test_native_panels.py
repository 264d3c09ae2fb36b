"""Laying out a weight needs little memory besides the result, so that loading stays below what runs later."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from naiad_kernels.linear import LoadOptions, prepare_linear
from naiad_kernels.native.panels import NativeWeight

_SHAPE = (65536, 512)


def _memory_bytes(name: str) -> int:
    """VmRSS, what this process holds, or VmHWM, the most that it has held."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise AssertionError(name)


def most_bytes(make: Callable[[], object]) -> int:
    """What making something needs at most."""
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak
    before_bytes = _memory_bytes("VmRSS")
    made = make()
    del made
    return _memory_bytes("VmHWM") - before_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_laying_out_a_large_weight_needs_little_memory(quantization: str, dtype: torch.dtype) -> None:
    options = LoadOptions(dtype=dtype, native=True, quantization=quantization)
    matrix = torch.randn(_SHAPE, dtype=torch.bfloat16)
    weight = prepare_linear(matrix, None, options)
    assert isinstance(weight, NativeWeight)
    del weight
    assert most_bytes(lambda: prepare_linear(matrix, None, options)) < 2.5 * matrix.nbytes
