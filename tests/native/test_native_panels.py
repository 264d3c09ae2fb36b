"""Laying out a weight needs little memory beside the weight itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from naiad.freed_memory import give_back_memory, large_pieces_returned
from naiad_kernels.linear import LoadOptions, prepare_linear
from naiad_kernels.native.panels import NativeWeight

_SHAPE = (65536, 512)


def memory_bytes(name: str) -> int:
    """VmRSS, what this process holds, or VmHWM, the most that it has held."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise AssertionError(name)


def most_bytes(make: Callable[[], object]) -> int:
    """What making something needs at most, as the loader has it made: what is freed is not kept."""
    with large_pieces_returned():
        make()
        give_back_memory()
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak
        before_bytes = memory_bytes("VmRSS")
        made = make()
        most = memory_bytes("VmHWM") - before_bytes
    del made
    return most


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_laying_out_a_large_weight_needs_little_memory(quantization: str) -> None:
    options = LoadOptions(dtype=torch.bfloat16, native=True, quantization=quantization)
    matrix = torch.randn(_SHAPE, dtype=torch.bfloat16)
    assert isinstance(prepare_linear(matrix, None, options), NativeWeight)
    assert most_bytes(lambda: prepare_linear(matrix, None, options)) < 2.2 * matrix.nbytes
