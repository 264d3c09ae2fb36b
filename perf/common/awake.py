"""Cores that do not sleep while something is measured or tested.

`python -m perf.common.awake COMMAND …` runs a command so.
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

# A kernel that groups processes by session shares time between the groups first: there the policy counts
# within the loop's own group only.
_LOOP = """
import contextlib, os, sys
core, parent = map(int, sys.argv[1:])
os.sched_setaffinity(0, {core})
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
with contextlib.suppress(OSError), open("/proc/self/autogroup", "w") as group:
    group.write("19")
while os.getppid() == parent:
    for _ in range(1_000_000):
        pass
"""


@contextmanager
def cores_kept_awake() -> Iterator[None]:
    """Let a loop of the lowest priority run on each core that this process may use.

    A virtual machine's host gives the cores that sleep to others, and is late to give them back: programs
    that wake each other lose more by it than one that computes. For a machine of one's own: a quota of
    processor time is used up by it, and a core that shares its units with another one slows that down.

    Raises:
        InternalError: a loop ended by itself, so that its core slept.
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
    """Run it with the cores kept awake, unless its time is limited; its exit code as a shell gives it."""
    if not command:
        print("usage: python -m perf.common.awake COMMAND …", file=sys.stderr)
        return 2
    code = 0
    try:
        with nullcontext() if _has_quota() else cores_kept_awake():
            code = _run(command)
    except InternalError as error:
        # It ran, only not as fast as it might have.
        print(f"perf.common.awake: {error}", file=sys.stderr)
    return code if code >= 0 else 128 - code


def _run(command: Sequence[str]) -> int:
    # The command has Ctrl-C from the terminal too, and ends in its own time. It would inherit SIG_IGN.
    signal.signal(signal.SIGINT, lambda *_: None)
    process = subprocess.Popen(command)
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    return process.wait()


def _has_quota(cgroup: Path = Path("/sys/fs/cgroup")) -> bool:
    """Whether the container's processor time is limited, by either version of control groups.

    A limit of a group below the one that the container sees as its root is not looked for.
    """
    for name, unlimited in (("cpu.max", "max"), ("cpu/cpu.cfs_quota_us", "-1")):
        with suppress(OSError):
            return (cgroup / name).read_text(encoding="ascii").split()[0] != unlimited
    return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
