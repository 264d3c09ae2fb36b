"""What a process keeps of what its threads have freed."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

# Two megabytes that now and then are made anew, whichever of eight threads does it.
CHURN = """
import sys, time
from concurrent.futures import ThreadPoolExecutor
from naiad.freed_memory import limit_arenas
if sys.argv[1:]:
    limit_arenas(int(sys.argv[1]))
def anonymous_kb():
    lines = open("/proc/self/smaps_rollup").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous"))
shared, small = [b""], []
def renew(_):
    shared[0] = b"x" * 1_900_000
    # What follows a block keeps it from being given back.
    small.append(b"y" * 1000)
    time.sleep(0.002)
before = anonymous_kb()
with ThreadPoolExecutor(8) as pool:
    list(pool.map(renew, range(400)))
print(anonymous_kb() - before)
"""


def grown_kb(*arguments: str, script: str = CHURN, **variables: str) -> int:
    environment = {name: value for name, value in os.environ.items() if name != "MALLOC_ARENA_MAX"}
    command = [sys.executable, "-c", script, *arguments]
    ended = subprocess.run(command, env=environment | variables, capture_output=True, text=True, check=True)
    return int(ended.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has arenas")
def test_fewer_arenas_keep_less() -> None:
    unlimited, limited = grown_kb(), grown_kb("2")
    assert limited < 0.7 * unlimited
    # What the user has set stays.
    assert grown_kb("2", MALLOC_ARENA_MAX="64") > 1.3 * limited


# Pieces of 20 MB that go, each with something small behind it.
PIECES = """
import sys
from naiad.freed_memory import return_large_pieces
if sys.argv[1:]:
    return_large_pieces(int(sys.argv[1]))
def anonymous_kb():
    lines = open("/proc/self/smaps_rollup").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous"))
small = []
before = anonymous_kb()
for round in range(3):
    large = []
    for _ in range(4):
        large.append(bytearray(20_000_000))
        small.append([bytes(1000) for _ in range(400)])
    large.clear()
print(anonymous_kb() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has such a threshold")
def test_large_pieces_go_back_to_the_system() -> None:
    kept, returned = grown_kb(script=PIECES), grown_kb("500000", script=PIECES)
    assert returned < 20_000
    assert kept > 2 * returned


# What stays lies behind a piece that goes, and nothing that follows fits into its room.
GROWING = """
import contextlib, sys
from naiad.freed_memory import large_pieces_returned
def anonymous_kb():
    lines = open("/proc/self/smaps_rollup").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous"))
def use(sizes):
    for size in sizes:
        piece = b"x" * size
        stays.append(b"y" * size)
        del piece
stays = []
first = b"x" * 20_000_000
del first
before = anonymous_kb()
with large_pieces_returned() if sys.argv[1:] else contextlib.nullcontext():
    use(range(1_000_000, 4_000_000, 100_000))
if sys.argv[1:] == ["after"]:
    stays.clear()
    before = anonymous_kb()
    use(range(4_000_000, 5_000_000, 100_000))
print((anonymous_kb() - before) * 1024_000 // sum(map(len, stays)))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has such a threshold")
def test_large_pieces_are_returned_during_a_block() -> None:
    """Thousandths of what stays; later pieces come from the heap again, which is faster."""
    kept, returned, later = (grown_kb(*when, script=GROWING) for when in ((), ("during",), ("after",)))
    assert returned < 1.1 * 1000
    assert kept > 1.6 * 1000
    assert later > 1.6 * 1000


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has such a threshold")
@pytest.mark.parametrize(
    "setting",
    [{"MALLOC_MMAP_THRESHOLD_": "33554432"}, {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=33554432"}],
)
def test_what_the_user_has_set_goes_before(setting: dict[str, str]) -> None:
    assert grown_kb("during", script=GROWING, **setting) > 1.6 * 1000


# Free room in the midst of the heap, in which large pieces may lie or not.
ROOM = """
import sys
from naiad.freed_memory import give_back_memory
def anonymous_kb():
    lines = open("/proc/self/smaps_rollup").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous"))
before = anonymous_kb()
room = [bytearray(100_000) for _ in range(100)]
behind = [bytes(5000) for _ in range(100)]
room.clear()
if sys.argv[1:]:
    give_back_memory()
print(anonymous_kb() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be asked to")
def test_free_room_in_the_heap_is_given_back() -> None:
    assert grown_kb(script=ROOM) > 9000
    assert grown_kb("gives back", script=ROOM) < 2000
