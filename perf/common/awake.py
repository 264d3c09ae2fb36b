"""Keeps CPU cores awake during measurements and tests.

`python -m perf.common.awake COMMAND …` runs a command with its cores kept awake.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from naiad.errors import InternalError

# A Linux kernel with autogroups first shares time between the groups of sessions. The policy applies within
# the loop's own group only, so the group gets the lowest priority too.
_LOOP = """
import contextlib, os, sys
core, parent = map(int, sys.argv[1:])
os.sched_setaffinity(0, {core})
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
with contextlib.suppress(OSError), open("/proc/self/autogroup", "w") as group:
    group.write("19")
while os.getppid() == parent:
    for _ in range(1000):
        os.sched_yield()
"""


@contextmanager
def cores_kept_awake() -> Iterator[None]:
    """Run a loop of the lowest priority on each core that this process may use.

    The host of a virtual machine gives sleeping cores to other machines and returns them late. This
    slows down processes that wake each other more than a process that computes. Use this only on a
    dedicated machine: the loop uses up a quota of CPU time, and slows down a core that shares its units.

    Raises:
        InternalError: a loop ended by itself, so that its core may have slept.
    """
    loops = [
        subprocess.Popen([sys.executable, "-c", _LOOP, str(core), str(os.getpid())], start_new_session=True)
        for core in sorted(os.sched_getaffinity(0))
    ]
    try:
        yield
        if any(loop.poll() is not None for loop in loops):
            raise InternalError("a loop that should have kept a core awake ended by itself")
    finally:
        for loop in loops:
            loop.kill()
        for loop in loops:
            loop.wait()


def main(command: Sequence[str]) -> int:
    """Run a command with the cores kept awake, unless CPU time is limited; return its exit code."""
    if not command:
        print("usage: python -m perf.common.awake COMMAND …", file=sys.stderr)
        return 2
    code = 0
    try:
        with nullcontext() if _has_quota() else cores_kept_awake():
            code = _run(command)
    except InternalError as error:
        # The command did run, but perhaps slower.
        print(f"perf.common.awake: {error}", file=sys.stderr)
    return code if code >= 0 else 128 - code


def _run(command: Sequence[str]) -> int:
    # The command gets Ctrl-C from the terminal too, and handles it. It would inherit SIG_IGN, but not this.
    signal.signal(signal.SIGINT, lambda *_: None)
    process = subprocess.Popen(command)
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    return process.wait()


def _has_quota(cgroup: Path = Path("/sys/fs/cgroup")) -> bool:
    """Whether the container's CPU time is limited, in either version of control groups.

    Only the group that the container sees as its root is checked.
    """
    for name, unlimited in (("cpu.max", "max"), ("cpu/cpu.cfs_quota_us", "-1")):
        with suppress(OSError):
            return (cgroup / name).read_text(encoding="ascii").split()[0] != unlimited
    return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
