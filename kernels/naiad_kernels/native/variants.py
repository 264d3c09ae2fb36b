"""The forms that the native kernels are compiled in, and which of them this CPU can run."""

from __future__ import annotations

import ctypes
import functools
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_CPU_INFO = Path("/proc/cpuinfo")
_V4 = frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"})
_V4_FLAGS = ("-march=x86-64-v4", "-mprefer-vector-width=512")
_V3 = frozenset({"avx2", "bmi1", "bmi2", "f16c", "fma"})
_BF16 = _V4 | _V3 | {"avx512_vnni", "avx512_bf16"}
_BF16_FLAGS = (*_V4_FLAGS, "-mavx512vnni", "-mavx512bf16")
_AMX = frozenset({"amx_tile", "amx_bf16", "amx_int8"})
_AMX_FLAGS = ("-mamx-tile", "-mamx-bf16", "-mamx-int8")
# A kernel that multiplies by tiles: see `src/tiles.h`.
_TILES_FLAG = "-DNAIAD_TILES"
_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to compile the kernels.

    Attributes:
        name: of the variant.
        compile_flags: the compiler's, beside those of all variants.
        needs: what the CPU must have, in the kernel's words.
    """

    name: str
    compile_flags: tuple[str, ...]
    needs: frozenset[str]

    @property
    def runs_here(self) -> bool:
        """Whether this CPU has what the variant needs, and Linux lets this process use it.

        A variant with tiles asks Linux for them: nothing else does, so ask before the variant is run.
        """
        return self.needs <= cpu_flags() and (not self.needs & _AMX or grants_amx())


PORTABLE = Variant("portable", ("-DNAIAD_PORTABLE",), frozenset())
# What `amx` computes, on any machine.
PORTABLE_AMX = Variant("portable_amx", ("-DNAIAD_PORTABLE", _TILES_FLAG), frozenset())
# The fastest first.
VARIANTS = (
    Variant("amx", (*_BF16_FLAGS, *_AMX_FLAGS, _TILES_FLAG), _BF16 | _AMX),
    Variant("avx512_bf16", _BF16_FLAGS, _BF16),
    Variant("avx512_vnni", (*_V4_FLAGS, "-mavx512vnni"), _V4 | _V3 | {"avx512_vnni"}),
    Variant("avx512", _V4_FLAGS, _V4 | _V3),
    Variant("avx2", ("-march=x86-64-v3",), _V3),
)


def usable_variants() -> Iterator[Variant]:
    """The variants that this CPU runs, the fastest first. The portable form is none: torch is faster."""
    return (each for each in VARIANTS if each.runs_here)


def best_variant() -> Variant | None:
    """The fastest variant that this CPU runs, if any."""
    return next(usable_variants(), None)


def grants_amx() -> bool:
    """Ask Linux to let this process and its threads use AMX tiles.

    Processes that it starts have to ask again. A container's seccomp profile may deny it, and so does a Linux
    before 5.16.
    """
    if platform.machine() != "x86_64":
        return False
    numbers = (_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA)
    return bool(ctypes.CDLL(None).syscall(*map(ctypes.c_long, numbers)) == 0)


@functools.cache
def cpu_flags() -> frozenset[str]:
    """The instruction sets of this CPU as Linux names them; empty where they cannot be read."""
    return frozenset(_cpu_info("flags").split()) if platform.machine() == "x86_64" else frozenset()


@functools.cache
def cpu_model() -> str:
    """The name of this CPU, with what else tells its kind; empty where it cannot be read."""
    parts = [_cpu_info(key) for key in ("model name", "cpu family", "model", "stepping", "cpu cores")]
    return " / ".join(parts) if any(parts) else ""


def _cpu_info(key: str) -> str:
    """What Linux says of the first CPU."""
    if not _CPU_INFO.exists():
        return ""
    for line in _CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return ""
