"""What the machine can do at a moment, and the share of it that an engine reached."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

from perf.peers.peak_products import PeakProducts
from perf.peers.read_bandwidth import ReadBandwidth


@dataclass(frozen=True, slots=True)
class Bounds:
    """The machine's speeds: bytes that its threads read, and operations that they compute, in a second."""

    bytes_per_s: float
    operations_per_s: float

    def mean(self, other: Bounds) -> Bounds:
        """Halfway between two measurements."""
        return Bounds(
            (self.bytes_per_s + other.bytes_per_s) / 2, (self.operations_per_s + other.operations_per_s) / 2
        )


@dataclass(frozen=True, slots=True)
class Need:
    """The least that a decode step, or else a prefill, must do: bytes to read and operations to compute."""

    num_bytes: float
    operations: float

    def memory_share(self, seconds: float, bounds: Bounds) -> float:
        """The share of the memory bound that was reached in this time."""
        return self.num_bytes / bounds.bytes_per_s / seconds

    def compute_share(self, seconds: float, bounds: Bounds) -> float:
        """The share of the compute bound that was reached in this time."""
        return self.operations / bounds.operations_per_s / seconds


class BoundMeter:
    """Measures the bounds with threads of this process."""

    def __init__(self, memory: ReadBandwidth, products: PeakProducts) -> None:
        """Nothing is measured yet."""
        self._memory = memory
        self.products = products

    def measure(self, num_bytes: int, bits: int) -> Bounds:
        """Measure, which takes about 0.2 s.

        Args:
            num_bytes: the size of the weights.
            bits: of the numbers that are multiplied.
        """
        return Bounds(self._memory.bytes_per_s(num_bytes), self.products.operations_per_s(bits))


@contextmanager
def bound_meter(threads: int, max_bytes: int, cpu_flags: Collection[str]) -> Iterator[BoundMeter]:
    """Start the threads; they end with the context.

    Args:
        threads: number of threads.
        max_bytes: the size of the largest weights.
        cpu_flags: the CPU's instruction sets as in /proc/cpuinfo.

    Raises:
        StartupError: the machine has no suitable C compiler.
    """
    with ThreadPoolExecutor(threads) as pool:
        yield BoundMeter(ReadBandwidth(pool, threads, max_bytes), PeakProducts(pool, threads, cpu_flags))
