"""Weights in large pages of memory, which the native kernels read faster than the small ones of a file."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from naiad.config.memory import available_memory_bytes
from naiad.models.memory_nodes import MemoryNodes

_LOG = logging.getLogger(__name__)
_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_LARGE_PAGE_BYTES = 2 << 20
# So much is copied before it takes the place of the file's pages.
_PIECE_BYTES = 32 << 20
# So much memory stays available for everything else.
_SPARE_BYTES = 512 << 20
_NICENESS = 10
_NUM_TRIES = 3
# The flags MREMAP_MAYMOVE and MREMAP_FIXED of Linux, and its advice MADV_COLLAPSE.
_TO_ADDRESS = 1 | 2
_COLLAPSE = 25
_Address, _Size = ctypes.c_void_p, ctypes.c_size_t


def own_memory(num_bytes: int) -> mmap.mmap:
    """Memory of the process's own, zero, which the system provides as it is written."""
    return mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def large_memory(num_bytes: int) -> mmap.mmap:
    """Such memory, which the system provides in large pages."""
    memory = own_memory(num_bytes)
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
    """Provides large pages in the background, while the engine starts, and serves, without them."""

    def __init__(
        self,
        available_bytes: Callable[[], int] = available_memory_bytes,
        nodes: MemoryNodes | None = None,
    ) -> None:
        """Begin with nothing to do.

        Args:
            available_bytes: says how much memory may still be allocated.
            nodes: what is moved is spread over them; None: over those of this process's CPUs.
        """
        self._available_bytes = available_bytes
        self._nodes = MemoryNodes.of_process() if nodes is None else nodes
        self._threads: list[threading.Thread] = []
        # For each tensor that is being moved.
        self._num_bytes_left: list[int] = []
        self._is_stopped = threading.Event()

    @property
    def num_reserved_bytes(self) -> int:
        """Memory that is still going to be taken for what is being moved, of what is available now."""
        return min(sum(self._num_bytes_left), max(0, self._available_bytes() - _SPARE_BYTES))

    def move(self, tensor: torch.Tensor) -> None:
        """Begin to move a tensor that maps a file.

        Its address and its content stay. Only whole large pages inside its memory are moved, in pieces; what
        does not fit into the machine's memory stays mapped.
        """
        self._num_bytes_left.append(tensor.nbytes)
        self._begin(partial(self._move, tensor, len(self._num_bytes_left) - 1))

    def enlarge(self, tensor: torch.Tensor, starts: Sequence[int]) -> None:
        """Provide large pages for a tensor in memory of the process's own, wherever it is written later.

        Args:
            tensor: fills its mapping.
            starts: addresses where it is written first: there are small pages until what was begun before
                is done, and then large ones, written or not.
        """
        if not has_large_pages():
            return
        begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        found = {start // _LARGE_PAGE_BYTES * _LARGE_PAGE_BYTES for start in starts}
        places = [each for each in sorted(found) if begin <= each and each + _LARGE_PAGE_BYTES <= end]
        libc = ctypes.CDLL(None)
        libc.madvise(_Address(begin), _Size(tensor.nbytes), mmap.MADV_HUGEPAGE)
        for place in places:
            libc.madvise(_Address(place), _Size(_LARGE_PAGE_BYTES), mmap.MADV_NOHUGEPAGE)
        # The first steps should not wait for this.
        self._begin(partial(self._enlarge, tensor, places), after=list(self._threads))

    def stop(self) -> None:
        """Leave what has not been done yet; nobody reads the memory any more."""
        self._is_stopped.set()

    def wait(self) -> None:
        """Return when everything has been done that can be."""
        for thread in self._threads:
            thread.join()

    def _begin(self, job: Callable[[], None], after: Sequence[threading.Thread] = ()) -> None:
        def run() -> None:
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
            for other in after:
                other.join()
            job()

        thread = threading.Thread(target=run, name="large-pages", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            _LOG.info("memory stays in small pages, which are read more slowly: %s", error)
        else:
            self._threads.append(thread)

    def _move(self, tensor: torch.Tensor, number: int) -> None:
        begin = -(-tensor.data_ptr() // _LARGE_PAGE_BYTES) * _LARGE_PAGE_BYTES
        end = (tensor.data_ptr() + tensor.nbytes) // _LARGE_PAGE_BYTES * _LARGE_PAGE_BYTES
        try:
            for address in range(begin, end, _PIECE_BYTES):
                if self._is_stopped.is_set():
                    return
                num_bytes = min(_PIECE_BYTES, end - address)
                if self._available_bytes() < num_bytes + _SPARE_BYTES:
                    _LOG.info("memory is short: weights stay in small pages, which are read more slowly")
                    return
                _move_piece(address, num_bytes, self._nodes)
                self._num_bytes_left[number] -= num_bytes
        except OSError as error:
            _LOG.info("weights stay in small pages, which are read more slowly: %s", error)
        finally:
            self._num_bytes_left[number] = 0

    def _enlarge(self, tensor: torch.Tensor, places: Sequence[int]) -> None:
        """Put large pages in these places of a tensor's memory."""
        libc = ctypes.CDLL(None)
        for place in places:
            if self._is_stopped.is_set():
                return
            libc.madvise(_Address(place), _Size(_LARGE_PAGE_BYTES), mmap.MADV_HUGEPAGE)
            # Linux has this advice since 6.1; without it the small pages stay until the system replaces them.
            libc.madvise(_Address(place), _Size(_LARGE_PAGE_BYTES), _COLLAPSE)


def _move_piece(address: int, num_bytes: int, nodes: MemoryNodes) -> None:
    """Put a copy in large pages in the place of what is mapped there; readers see either, which are equal.

    Args:
        address: of a large page.
        num_bytes: a multiple of a large page's size.
        nodes: the copy is spread over them.

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
    nodes.spread(copy, num_bytes)
    ctypes.memmove(copy, address, num_bytes)
    libc.mprotect(_Address(copy), _Size(num_bytes), mmap.PROT_READ)
    # If the system lacks memory for its own tables, the old pages may be gone: then only the copy helps.
    for _ in range(_NUM_TRIES):
        if _put(libc, copy, num_bytes, address):
            return
    error = ctypes.get_errno()
    _unmap(libc, copy, num_bytes)
    raise OSError(error, "memory cannot be moved")


def _put(libc: ctypes.CDLL, copy: int, num_bytes: int, address: int) -> bool:
    """Put a copy in the place of what is mapped at an address."""
    size = _Size(num_bytes)
    found: int = libc.mremap(_Address(copy), size, size, _TO_ADDRESS, _Address(address))
    return found == address


def _unmap(libc: ctypes.CDLL, address: int, num_bytes: int) -> None:
    if num_bytes:
        libc.munmap(_Address(address), _Size(num_bytes))
