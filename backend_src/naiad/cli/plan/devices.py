"""GPUs by name, with the figures of their makers' data sheets."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Device:
    """What a device can do at best.

    Attributes:
        memory_bytes: of the device.
        bytes_per_s: read from memory.
        operations_per_s: dense multiplications and additions, by the bits of an operand: 16 and 8.
    """

    memory_bytes: float
    bytes_per_s: float
    operations_per_s: dict[int, float]


def _device(gigabytes: float, terabytes_per_s: float, teraflops_16: float, teraflops_8: float) -> Device:
    return Device(gigabytes * 1e9, terabytes_per_s * 1e12, {16: teraflops_16 * 1e12, 8: teraflops_8 * 1e12})


# NVIDIA's data sheets; products without sparsity. The A100 and A10 multiply int8 at their second figure, the
# others FP8 too.
DEVICES = {
    "a10": _device(24, 0.600, 125, 250),
    "a100-40gb": _device(40, 1.555, 312, 624),
    "a100-80gb": _device(80, 2.039, 312, 624),
    "b200": _device(180, 8.0, 2250, 4500),
    "h100": _device(80, 3.35, 989, 1979),
    "h200": _device(141, 4.8, 989, 1979),
    "l4": _device(24, 0.300, 121, 242),
    "l40s": _device(48, 0.864, 362, 733),
    "rtx-4090": _device(24, 1.008, 165, 330),
}
