"""Compiles the kernels of a launch without a GPU, and reads the resources that they need."""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

# The most shared memory, in bytes, that one program can use on each architecture.
SHARED_MEMORY_BYTES = {80: 166_912, 90: 232_448}
# The oldest triton that pyproject.toml allows.
OLDEST_TRITON = "3.6.0"

_TOOL = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+)")
_TENSOR_CORE = re.compile(r"\b(?:HGMMA|HMMA|IGMMA|IMMA|QGMMA)\b")


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """The resources of one compiled variant.

    Attributes:
        kernel: name of the function.
        capability: 80 for sm_80, and so on.
        registers: registers per thread.
        stack_bytes: stack per thread; if not 0, registers are spilled.
        shared_bytes: shared memory per program.
        num_warps: warps per program.
        tensor_core_ops: number of tensor-core instructions in the code, of Hopper's and of older kinds.
        variant: equal for launches that run the same compiled code.
    """

    kernel: str
    capability: int
    registers: int
    stack_bytes: int
    shared_bytes: int
    num_warps: int
    tensor_core_ops: int
    variant: str


class _AbsentGPU:
    """The part of a triton-lang driver that compiling needs."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        # Compiled kernels are cached by device, so each architecture needs its own number.
        return self._capability

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def compile_launches(launch: Callable[[], object], capability: int) -> list[CompiledKernel]:
    """Compile every kernel that `launch` would start, without starting it.

    Args:
        launch: calls the launchers with CPU tensors of the same shapes and alignment as in serving.
        capability: the GPU's compute capability, 80 or 90.
    """
    with _collecting(capability) as kernels:
        launch()
    return [_describe(kernel, capability) for kernel in kernels]


@contextmanager
def _collecting(capability: int) -> Iterator[list[Any]]:
    kernels: list[Any] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        kernels.append(run(self, *args, grid=grid, warmup=True, **options))

    # `driver.reset_active` would look for a GPU, so the attribute is restored instead.
    absent = mock.patch.object(driver, "_active", _AbsentGPU(capability))
    with absent, mock.patch.object(JITFunction, "run", compile_only):
        yield kernels


@functools.cache
def _describe(kernel: Any, capability: int) -> CompiledKernel:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = _USAGE.search(_cuobjdump("--dump-resource-usage", file.name))
        sass = _cuobjdump("--dump-sass", file.name)
    assert usage is not None, "cuobjdump names no registers"
    return CompiledKernel(
        kernel=kernel.metadata.name,
        capability=capability,
        registers=int(usage[1]),
        stack_bytes=int(usage[2]),
        shared_bytes=kernel.metadata.shared,
        num_warps=kernel.metadata.num_warps,
        tensor_core_ops=len(_TENSOR_CORE.findall(sass)),
        variant=kernel.hash,
    )


def _cuobjdump(option: str, path: str) -> str:
    return subprocess.run([_TOOL, option, path], check=True, capture_output=True, text=True).stdout
