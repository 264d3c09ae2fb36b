"""A process whose seccomp profile denies it AMX tiles and memory policies, as a container's may.

Prints as JSON whether it gets tiles, the variant of the native kernels that it uses, a product of theirs in
hexadecimal digits, and what the log says of memory nodes. Ends with `NO_FILTER` if Linux takes no filter.
"""

from __future__ import annotations

import ctypes
import errno
import json
import logging
import mmap
import struct
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from naiad_kernels.native.library import Library

NO_FILTER = 77
_NO_NEW_PRIVS, _SECCOMP, _FILTER = 38, 22, 2
_MBIND, _ARCH_PRCTL, _REQUEST_TILES = 237, 158, 0x1023
# Instructions of the filter: load a word of the call, go on if it is equal, return.
_LOAD, _IS_EQUAL, _RETURN = 0x20, 0x15, 0x06
_NUMBER_AT, _FIRST_ARGUMENT_AT = 0, 16
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM


def deny() -> None:
    """Let Linux refuse both system calls to this thread and all that it starts.

    Raises:
        OSError: Linux does not take the filter.
    """
    program = [
        (_LOAD, 0, 0, _NUMBER_AT),
        (_IS_EQUAL, 4, 0, _MBIND),
        (_IS_EQUAL, 0, 2, _ARCH_PRCTL),
        (_LOAD, 0, 0, _FIRST_ARGUMENT_AT),
        (_IS_EQUAL, 1, 0, _REQUEST_TILES),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _REFUSE),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in program))
    described = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(program), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    nothing = (ctypes.c_ulong(0),) * 3
    for option, value, *rest in (
        (_NO_NEW_PRIVS, ctypes.c_ulong(1), *nothing),
        (_SECCOMP, ctypes.c_ulong(_FILTER), described, *nothing[:2]),
    ):
        if libc.prctl(option, value, *rest):
            raise OSError(ctypes.get_errno(), "Linux does not take the filter")


def product_of(library: Library) -> str:
    """The hexadecimal digits of a product in bfloat16, whose sums differ between tiles and vectors."""
    import torch

    from helpers.native_tapes import run_records
    from naiad_kernels.linear import linear
    from naiad_kernels.native.panels import NativeWeight

    draw = torch.Generator().manual_seed(5)
    weight = NativeWeight.of(torch.randn(70, 300, generator=draw).bfloat16(), None)
    x = torch.randn(5, 300, generator=draw)
    made = run_records(library.new_team(2), lambda _, x: linear(x, weight), x)
    return made.numpy().tobytes().hex()


def main() -> int:
    try:
        deny()
    except OSError:
        return NO_FILTER
    # Threads that libraries start when they are imported have the filter too.
    from naiad.models.memory_nodes import MemoryNodes
    from naiad_kernels.native.build import load
    from naiad_kernels.native.variants import best_variant, grants_amx

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("naiad")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    memory = mmap.mmap(-1, 2 * mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    nodes = MemoryNodes([0, 1])
    for page in range(2):
        nodes.spread(address + page * mmap.PAGESIZE, mmap.PAGESIZE)
    variant = best_variant()
    assert variant is not None
    digits = product_of(load(variant))
    found = {"has_tiles": grants_amx(), "variant": variant.name, "product": digits, "log": lines}
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
