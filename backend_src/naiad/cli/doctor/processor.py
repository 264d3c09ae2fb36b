"""What the processor offers: instruction sets, and how fast its cores read memory."""

from __future__ import annotations

import time

import torch

# In the kernel's words; each kind of instruction that the kernels, or torch's, may use.
INSTRUCTION_SETS = (
    "avx2",
    "avx512f",
    "avx512_bf16",
    "avx_vnni",
    "avx512_vnni",
    "amx_tile",
    "amx_bf16",
    "amx_int8",
)
_READ_BYTES = 256 << 20
_READ_S = 1.0


def read_bandwidth(num_threads: int) -> float:
    """The most bytes per second that this many threads have read from memory, measured for about a second."""
    torch.set_num_threads(num_threads)
    values = torch.ones(_READ_BYTES // 8, dtype=torch.int64)
    best_s, now_s = float("inf"), time.perf_counter()
    end_s = now_s + _READ_S
    # Once at least, also where the time is over before the first read has begun.
    while best_s == float("inf") or now_s < end_s:
        start_s = time.perf_counter()
        values.sum()
        now_s = time.perf_counter()
        best_s = min(best_s, now_s - start_s)
    return _READ_BYTES / best_s
