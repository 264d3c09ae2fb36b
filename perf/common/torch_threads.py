"""Torch's thread count in measurements, because an engine with native kernels leaves torch one thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from naiad.config.cores import num_compute_threads


@contextmanager
def all_cores() -> Iterator[None]:
    """Let torch use all cores meanwhile."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(num_compute_threads())
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
