"""How fast threads read a buffer as large as a model's weights: the bound of decoding a small batch."""

from __future__ import annotations

import ctypes
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
from perf.peers.compiled import compiled

_SOURCE = Path(__file__).with_suffix(".c")
_NUM_READS = 8
_WORD_BYTES = 8


class ReadBandwidth:
    """A buffer of which each thread reads its own part."""

    def __init__(self, pool: ThreadPoolExecutor, threads: int, max_bytes: int) -> None:
        """Fill the buffer.

        Args:
            pool: its threads read.
            threads: number of the pool's threads.
            max_bytes: size of the buffer.

        Raises:
            StartupError: the machine has no C compiler.
        """
        self._library = compiled(_SOURCE, ("-O3", "-march=native"))
        self._library.read_all.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
        self._library.read_all.restype = ctypes.c_uint64
        self._pool = pool
        num_words = max_bytes // _WORD_BYTES // threads
        # Each part is written first by a thread of the pool, so it lies in its memory.
        self._parts = list(pool.map(lambda number: np.full(num_words, number, np.uint64), range(threads)))

    def bytes_per_s(self, num_bytes: int) -> float:
        """Read the buffer's first bytes several times; the median counts.

        Args:
            num_bytes: at most the buffer's size. What a cache holds of it is read faster than memory.
        """
        num_words = num_bytes // _WORD_BYTES // len(self._parts)
        parts = [part[:num_words] for part in self._parts]
        times = []
        for _ in range(1 + _NUM_READS):
            start_s = time.perf_counter()
            list(self._pool.map(self._read, parts))
            times.append(time.perf_counter() - start_s)
        return sum(part.nbytes for part in parts) / statistics.median(times[1:])

    def _read(self, part: npt.NDArray[np.uint64]) -> None:
        self._library.read_all(part.ctypes.data, part.size)
