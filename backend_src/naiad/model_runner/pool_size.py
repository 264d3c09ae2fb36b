"""Determines how many bytes the KV cache gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from naiad.config.memory import available_memory_bytes
from naiad.errors import ConfigError

_MAX_DEFAULT_CPU_BYTES = 2 << 30


class DeviceMemory(Protocol):
    """The memory of a GPU."""

    def total_bytes(self) -> int:
        """Total memory of the GPU."""

    def used_bytes(self) -> int:
        """Memory in use by any program, including what torch keeps for reuse."""

    def give_back(self) -> None:
        """Release the memory that torch keeps for reuse."""


class CudaMemory:
    """The memory of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        """Measure the memory of `device`."""
        self._device = device

    def total_bytes(self) -> int:
        """Total memory of the GPU."""
        return torch.cuda.mem_get_info(self._device)[1]

    def used_bytes(self) -> int:
        """Memory in use once all queued work is done."""
        torch.cuda.synchronize(self._device)
        free_bytes, total_bytes = torch.cuda.mem_get_info(self._device)
        return total_bytes - free_bytes

    def give_back(self) -> None:
        """Release the memory that torch keeps for reuse."""
        torch.cuda.empty_cache()


def default_cpu_bytes(num_reserved_bytes: int = 0) -> int:
    """Return the default size on a CPU; call it after the weights are loaded.

    Args:
        num_reserved_bytes: memory that is still going to be taken for something else.
    """
    return min(_MAX_DEFAULT_CPU_BYTES, max(available_memory_bytes() - num_reserved_bytes, 0) // 4)


def measured_bytes(memory: DeviceMemory, fraction: float, rehearse: Callable[[], object]) -> int:
    """Measure how much GPU memory is left for the KV cache.

    Args:
        memory: the GPU's memory, with the weights loaded.
        fraction: `kv_cache_memory_fraction`.
        rehearse: computes the largest steps; torch keeps the memory that they took. Its result holds
            memory, such as that of graphs, that will be allocated again.

    Raises:
        ConfigError: nothing is left.
    """
    held = rehearse()
    used_bytes = memory.used_bytes()
    del held
    memory.give_back()
    return bytes_left(fraction, memory.total_bytes(), used_bytes)


def bytes_left(fraction: float, total_bytes: int, used_bytes: int) -> int:
    """Return how many bytes can be allocated until this fraction of the memory is in use.

    Raises:
        ConfigError: nothing is left.
    """
    left_bytes = int(fraction * total_bytes) - used_bytes
    if left_bytes <= 0:
        raise ConfigError(
            "kv_cache_memory_fraction",
            fraction,
            f"more than {used_bytes / total_bytes:.3f}, the share of the GPU's memory that weights, the "
            "largest step and other programs use; raise it, free memory, or lower max_num_batched_tokens",
        )
    return left_bytes
