"""How fast threads multiply without waiting for memory: the bound of prefill and of large batches."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from perf.peers.compiled import compiled

from naiad.errors import StartupError

_SOURCE = Path(__file__).with_suffix(".c")
_NUM_RUNS = 7
_RUN_S = 0.01
_FIRST_TURNS = 1000


@dataclass(frozen=True, slots=True)
class Product:
    """An instruction that multiplies.

    Attributes:
        function: in `peak_products.c`.
        operations: of one turn of the function; a product and its addition are two.
        needs: the CPU's instruction sets as in /proc/cpuinfo.
    """

    function: str
    operations: int
    needs: frozenset[str]

    @property
    def uses_tiles(self) -> bool:
        """Whether the process needs Linux's permission."""
        return "amx_tile" in self.needs


_FLOAT32 = (
    Product("fma_512", 28 * 16 * 2, frozenset({"avx512f"})),
    Product("fma_256", 12 * 8 * 2, frozenset({"avx2", "fma"})),
)
# Bits of a number that is multiplied → the fastest instruction first.
PRODUCTS = {
    # Numbers of 32 bits by weights that 16 bits hold exactly, as three tiles.
    32: (
        Product("tiles_bf16", 2 * 16 * 16 * 32 * 2, frozenset({"amx_tile", "amx_bf16"})),
        *_FLOAT32,
    ),
    16: (
        Product("tiles_bf16", 6 * 16 * 16 * 32 * 2, frozenset({"amx_tile", "amx_bf16"})),
        Product("bf16_512", 28 * 32 * 2, frozenset({"avx512f", "avx512_bf16"})),
        *_FLOAT32,
    ),
    8: (
        Product("tiles_int8", 6 * 16 * 16 * 64 * 2, frozenset({"amx_tile", "amx_int8"})),
        Product("vnni_512", 28 * 64 * 2, frozenset({"avx512f", "avx512_vnni"})),
        Product("vnni_256", 12 * 32 * 2, frozenset({"avx_vnni"})),
        Product("bytes_512", 28 * 64 * 2, frozenset({"avx512bw"})),
        Product("bytes_256", 12 * 32 * 2, frozenset({"avx2"})),
    ),
}


def fastest(bits: int, cpu_flags: Collection[str], has_tiles: bool) -> Product:
    """The fastest instruction that the CPU has.

    Args:
        bits: of the numbers that are multiplied, a key of `PRODUCTS`.
        cpu_flags: the CPU's instruction sets as in /proc/cpuinfo.
        has_tiles: whether Linux permits AMX.

    Raises:
        StartupError: the CPU has none of them.
    """
    for product in PRODUCTS[bits]:
        if product.needs.issubset(cpu_flags) and (has_tiles or not product.uses_tiles):
            return product
    raise StartupError("this CPU has no AVX2 and FMA, the least that the compute bound is measured with")


class PeakProducts:
    """The fastest instructions of this CPU, run by all threads at the same time."""

    def __init__(self, pool: ThreadPoolExecutor, threads: int, cpu_flags: Collection[str]) -> None:
        """Compile them.

        Args:
            pool: its threads multiply.
            threads: number of the pool's threads.
            cpu_flags: the CPU's instruction sets as in /proc/cpuinfo.

        Raises:
            StartupError: the machine has no C compiler, or one that does not know the instructions.
        """
        self._library = compiled(_SOURCE, ("-O2",))
        self._pool = pool
        self._threads = threads
        self._flags = cpu_flags
        self._has_tiles = "amx_tile" in cpu_flags and self._library.request_tiles() == 0
        self._turns: dict[Product, int] = {}

    def product(self, bits: int) -> Product:
        """The instruction that is measured for numbers of this many bits; see `fastest`."""
        return fastest(bits, self._flags, self._has_tiles)

    def operations_per_s(self, bits: int) -> float:
        """Multiply for a few short runs; the median counts, summed over the threads."""
        product = self.product(bits)
        if product not in self._turns:
            first_s = min(self._run_s(product, _FIRST_TURNS) for _ in range(3))
            self._turns[product] = max(_FIRST_TURNS, round(_FIRST_TURNS * _RUN_S / first_s))
        turns = self._turns[product]
        seconds = statistics.median(self._run_s(product, turns) for _ in range(_NUM_RUNS))
        return self._threads * turns * product.operations / seconds

    def _run_s(self, product: Product, turns: int) -> float:
        function = getattr(self._library, product.function)
        function.argtypes, function.restype = (ctypes.c_uint64,), None
        start_s = time.perf_counter()
        list(self._pool.map(function, [turns] * self._threads))
        return time.perf_counter() - start_s
