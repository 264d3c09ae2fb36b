"""How fast threads read a buffer as large as a model's weights: the bound of decoding a small batch."""

from __future__ import annotations

import ctypes
import os
import shutil
import statistics
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
from perf.peers.environments import BUILD

from naiad.errors import StartupError

_SOURCE = Path(__file__).with_suffix(".c")
_NUM_READS = 20
_NUM_WARM_UPS = 3


def read_bytes_per_s(num_bytes: int, threads: int) -> float:
    """Measure; each thread reads its own part again and again, and the median read counts.

    Args:
        num_bytes: size of the buffer.
        threads: number of threads.

    Raises:
        StartupError: the machine has no C compiler.
    """
    library = ctypes.CDLL(str(_compiled()))
    library.read_all.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    library.read_all.restype = ctypes.c_uint64
    num_words = num_bytes // 8 // threads
    with ThreadPoolExecutor(threads) as pool:
        # Each part is written first by a thread of the pool, so it lies in its memory.
        parts = list(pool.map(lambda number: np.full(num_words, number, np.uint64), range(threads)))

        def read(part: npt.NDArray[np.uint64]) -> None:
            library.read_all(part.ctypes.data, part.size)

        times = []
        for _ in range(_NUM_WARM_UPS + _NUM_READS):
            start_s = time.perf_counter()
            list(pool.map(read, parts))
            times.append(time.perf_counter() - start_s)
    return sum(part.nbytes for part in parts) / statistics.median(times[_NUM_WARM_UPS:])


def _compiled() -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise StartupError("there is no C compiler: install one, such as gcc; llama.cpp needs it too")
    library = BUILD / "read_bandwidth.so"
    library.parent.mkdir(parents=True, exist_ok=True)
    unfinished = library.with_suffix(f".{os.getpid()}")
    command = [compiler, "-O3", "-march=native", "-shared", "-fPIC", str(_SOURCE), "-o", str(unfinished)]
    subprocess.run(command, check=True)
    unfinished.rename(library)
    return library
