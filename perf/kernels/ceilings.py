"""Measures the speed of a device: of a copy, and of a matrix product."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from perf.kernels.clock import Clock
from perf.kernels.sizes import Sizes


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The measured speeds of a device.

    Attributes:
        bytes_per_s: the bandwidth of a copy, counting bytes read and written.
        flops_per_s: the speed of a product of square matrices in the model's dtype.
    """

    bytes_per_s: float
    flops_per_s: float

    def settings(self) -> dict[str, float]:
        """The speeds as settings for a report."""
        return {f"ceiling_{name}": value for name, value in asdict(self).items()}


def measure_ceilings(sizes: Sizes, device: torch.device, clock: Clock) -> Ceilings:
    """Measure with random numbers: a GPU needs less power for zeros and computes them faster."""
    source = torch.randn(sizes.copy_bytes // 4, device=device)
    target = torch.empty_like(source)
    side = sizes.product_side
    left, right = (torch.randn(side, side, device=device).to(sizes.dtype) for _ in range(2))
    copy_s = clock.time(lambda: target.copy_(source)).median_s
    product_s = clock.time(lambda: left @ right).median_s
    return Ceilings(2 * sizes.copy_bytes / copy_s, 2 * side**3 / product_s)
