"""Writes the table of compiled kernels and what each of them needs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import triton
from perf.compile_gate.compiled import SHARED_MEMORY_BYTES, CompiledKernel, compile_launches
from perf.compile_gate.served import SHAPES, ServedShape, launches

_HEADER = f"""# Compiled kernels

The registers and memory that each triton-lang kernel needs on the shapes it is compiled for,
with triton {triton.__version__}. The numbers come from the compiled code; no GPU is involved.
`python -m perf.compile_gate docs/kernels.md` writes this page, and
`tests/kernels/test_compile_gate.py` asserts the limits. Times on an H100 are in
[performance.md](performance.md#on-a-gpu).

A shape is a model's name, its dtype, the cache's block size, and the cache's dtype if it is
quantized; FP8 needs sm_90. The shapes of Gemma compile attention for each window of their layers.
An op has one row for each variant that its launches compile. The last column is the number of
programs for which one multiprocessor has registers and shared memory.

The engine does not call `lora_shrink` and `lora_expand` yet: the layers' products will call them for
requests with an adapter.

| shape | kernel | GPU | registers | spilled bytes | shared memory | warps | programs |
|---|---|---|---|---|---|---|---|
"""
_REGISTERS, _THREADS_PER_WARP, _RESERVED_BYTES = 65_536, 32, 1_024
_MAX_WARPS, _MAX_PROGRAMS = 64, 32


def main() -> int:
    """Compile everything and write the page."""
    parser = argparse.ArgumentParser(prog="python -m perf.compile_gate", description=__doc__)
    parser.add_argument("page", type=Path, metavar="PAGE", help="the page to write, such as docs/kernels.md")
    page: Path = parser.parse_args().page
    page.write_text(_HEADER + "".join(_rows()))
    return 0


def _rows() -> Iterator[str]:
    for shape in SHAPES:
        for capability in shape.capabilities:
            yield from _rows_of(shape, capability)


def _rows_of(shape: ServedShape, capability: int) -> Iterator[str]:
    compiled = [kernel for op in shape.ops for kernel in compile_launches(launches(shape, op), capability)]
    for each in {kernel.variant: kernel for kernel in compiled}.values():
        cells = (
            *(shape.label, each.kernel.strip("_").removesuffix("_kernel"), f"sm_{capability}"),
            *(each.registers, each.stack_bytes, each.shared_bytes, each.num_warps, _programs(each)),
        )
        yield "| " + " | ".join(map(str, cells)) + " |\n"


def _programs(kernel: CompiledKernel) -> int:
    """Number of programs that run on one multiprocessor at a time."""
    by_memory = SHARED_MEMORY_BYTES[kernel.capability] // (kernel.shared_bytes + _RESERVED_BYTES)
    by_registers = _REGISTERS // (kernel.registers * kernel.num_warps * _THREADS_PER_WARP)
    return min(by_memory, by_registers, _MAX_WARPS // kernel.num_warps, _MAX_PROGRAMS)


if __name__ == "__main__":
    sys.exit(main())
