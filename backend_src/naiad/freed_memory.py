"""How much of what this process has freed it keeps."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
_USERS_SETTINGS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")
# What glibc begins with, and the most that it comes to by itself.
_FIRST_BYTES, _LAST_BYTES = 128 << 10, 32 << 20


def give_back_memory() -> None:
    """Return freed memory to the system: the C library would keep most of what large work has needed."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def limit_arenas(num_arenas: int) -> None:
    """Have the C library take memory for all threads from so many arenas; to be called before threads start.

    Each arena keeps what was freed in it. What is replaced by something larger now and then, whichever thread
    does it, would leave its size in the arena of every thread. MALLOC_ARENA_MAX goes before.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and "MALLOC_ARENA_MAX" not in os.environ:
        mallopt(_ARENA_MAX, num_arenas)


def return_large_pieces(min_bytes: int) -> None:
    """Have the C library return pieces of memory at least so large as soon as they are freed.

    By itself it keeps ever larger ones, up to 32 MiB, once such a piece has been freed.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        mallopt(_MMAP_THRESHOLD, min_bytes)


@contextlib.contextmanager
def large_pieces_returned() -> Iterator[None]:
    """Have the C library return large pieces of memory as soon as they are freed, until the block ends.

    From then on it keeps pieces of up to 32 MiB, whatever was set before. What the user has set in the
    environment goes before.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(name in os.environ for name in _USERS_SETTINGS):
        yield
        return
    mallopt(_MMAP_THRESHOLD, _FIRST_BYTES)
    try:
        yield
    finally:
        mallopt(_MMAP_THRESHOLD, _LAST_BYTES)
        mallopt(_TRIM_THRESHOLD, 2 * _LAST_BYTES)
