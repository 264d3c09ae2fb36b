"""Weights in large pages of memory, which the native kernels read faster than the small ones of a file."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from naiad.config.memory import available_memory_bytes

_LOG = logging.getLogger(__name__)
_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_LARGE_PAGE_BYTES = 2 << 20
# So much is copied before it takes the place of the file's pages.
_PIECE_BYTES = 32 << 20
# So much memory stays available for everything else.
_SPARE_BYTES = 512 << 20
_NICENESS = 10
# The flags MREMAP_MAYMOVE and MREMAP_FIXED of Linux.
_TO_ADDRESS = 1 | 2
_Address, _Size = ctypes.c_void_p, ctypes.c_size_t


def large_memory(num_bytes: int) -> mmap.mmap:
    """Memory of the process's own, zero, which the system provides in large pages as it is written."""
    memory = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without large pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def has_large_pages(setting: Path = _SETTING) -> bool:
    """Whether the system gives large pages to programs that ask for them."""
    try:
        return "[never]" not in setting.read_text(encoding="ascii")
    except OSError:
        return False


class LargePages:
    """Moves mapped weights into large pages while the engine starts, and serves, with the mapped ones."""

    def __init__(self, available_bytes: Callable[[], int] = available_memory_bytes) -> None:
        """Begin with nothing to move.

        Args:
            available_bytes: says how much memory may still be allocated.
        """
        self._available_bytes = available_bytes
        self._threads: list[threading.Thread] = []
        self._num_bytes_left = 0

    @property
    def num_bytes_left(self) -> int:
        """Memory that is still going to be taken."""
        return self._num_bytes_left

    def move(self, tensor: torch.Tensor) -> None:
        """Begin to move a tensor that maps a file.

        Its address and its content stay. Only whole large pages inside its memory are moved, in pieces; what
        does not fit into the machine's memory stays mapped.
        """
        thread = threading.Thread(target=self._move, args=(tensor,), name="large-pages", daemon=True)
        self._threads.append(thread)
        self._num_bytes_left += tensor.nbytes
        thread.start()

    def wait(self) -> None:
        """Return when everything has been moved that can be."""
        for thread in self._threads:
            thread.join()

    def _move(self, tensor: torch.Tensor) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        begin = -(-tensor.data_ptr() // _LARGE_PAGE_BYTES) * _LARGE_PAGE_BYTES
        end = (tensor.data_ptr() + tensor.nbytes) // _LARGE_PAGE_BYTES * _LARGE_PAGE_BYTES
        try:
            for address in range(begin, end, _PIECE_BYTES):
                num_bytes = min(_PIECE_BYTES, end - address)
                if self._available_bytes() < num_bytes + _SPARE_BYTES:
                    _LOG.info("memory is short: weights stay in small pages, which are read more slowly")
                    return
                _move_piece(address, num_bytes)
                self._num_bytes_left -= num_bytes
        except OSError as error:
            _LOG.info("weights stay in small pages, which are read more slowly: %s", error)
        finally:
            self._num_bytes_left = 0


def _move_piece(address: int, num_bytes: int) -> None:
    """Put a copy in large pages in the place of what is mapped there; readers see either, which are equal.

    Raises:
        OSError: the system does not provide the memory.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    for each in (libc.mmap, libc.mremap):
        each.restype = ctypes.c_void_p
    no_place = ctypes.c_void_p(-1).value
    readable, private = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    size = _Size(num_bytes + _LARGE_PAGE_BYTES)
    found = libc.mmap(None, size, readable, private, -1, ctypes.c_long(0))
    if found == no_place:
        raise OSError(ctypes.get_errno(), "no memory is mapped")
    # Large pages move as such from one multiple of their size to another.
    copy = -(-found // _LARGE_PAGE_BYTES) * _LARGE_PAGE_BYTES
    _unmap(libc, found, copy - found)
    _unmap(libc, copy + num_bytes, found + _LARGE_PAGE_BYTES - copy)
    libc.madvise(_Address(copy), _Size(num_bytes), mmap.MADV_HUGEPAGE)
    ctypes.memmove(copy, address, num_bytes)
    libc.mprotect(_Address(copy), _Size(num_bytes), mmap.PROT_READ)
    size = _Size(num_bytes)
    if libc.mremap(_Address(copy), size, size, _TO_ADDRESS, _Address(address)) == no_place:
        error = ctypes.get_errno()
        _unmap(libc, copy, num_bytes)
        raise OSError(error, "memory cannot be moved")


def _unmap(libc: ctypes.CDLL, address: int, num_bytes: int) -> None:
    if num_bytes:
        libc.munmap(_Address(address), _Size(num_bytes))
