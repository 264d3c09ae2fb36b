"""Lays out a large weight in each way, and prints how much memory each needed at most, of the weight's size.

It is a process of its own, because what was freed before would be taken first and hide some of the need.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from perf.engine.timed_start import memory_bytes

from naiad.freed_memory import large_pieces_returned
from naiad_kernels.linear import LoadOptions, prepare_linear
from naiad_kernels.native.panels import NativeWeight

SHAPE = (65536, 512)


def main() -> None:
    """Print a line of JSON: quantization → the share."""
    torch.set_num_threads(1)
    with large_pieces_returned():
        matrix = torch.randn(SHAPE, dtype=torch.bfloat16)
        print(
            json.dumps({each: most_bytes(matrix, each) / matrix.nbytes for each in ("none", "int8", "int4")})
        )


def most_bytes(matrix: torch.Tensor, quantization: str) -> int:
    """What a weight's layout needs at most beside the matrix, the result included."""
    options = LoadOptions(dtype=torch.bfloat16, native=True, quantization=quantization)
    # What is loaded only now, such as libraries, does not count.
    assert isinstance(prepare_linear(matrix, None, options), NativeWeight)
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak
    before_bytes = memory_bytes("VmRSS")
    weight = prepare_linear(matrix, None, options)
    most = memory_bytes("VmHWM") - before_bytes
    del weight
    return most


if __name__ == "__main__":
    main()
