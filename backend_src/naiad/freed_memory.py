"""Returns memory that this process has freed to the system."""

from __future__ import annotations

import ctypes


def give_back_memory() -> None:
    """Return freed memory to the system: the C library would keep most of what large work has needed."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
