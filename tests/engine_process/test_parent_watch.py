from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from helpers.engine_harness import has_ended, wait_until

CHILD = """
import errno, os, pathlib, sys, time
from naiad import parent_watch

def before_exit():
    pathlib.Path(sys.argv[1]).unlink()
    if sys.argv[2] == "raises":
        raise RuntimeError

def refuse(pid):
    raise OSError(errno.ENOSYS, "no such system call")

def forbid(seconds):
    raise AssertionError("the parent is asked for again and again")

sleep = time.sleep
if sys.argv[3] == "is told":
    time.sleep = forbid
else:
    os.pidfd_open = refuse
parent_watch.end_with_parent(before_exit)
print("watching", flush=True)
sleep(60)
"""
PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", *sys.argv[1:]], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("how", ["is told", "asks"])
@pytest.mark.parametrize("behaviour", ["returns", "raises"])
def test_process_ends_with_its_killed_parent(tmp_path: Path, behaviour: str, how: str) -> None:
    """The kernel tells it of the end, so it never sleeps; where the kernel can not, the process asks."""
    leftover = tmp_path / "leftover"
    leftover.touch()
    arguments = [sys.executable, "-c", PARENT, CHILD, str(leftover), behaviour, how]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert not has_ended(pid)
        assert leftover.exists()
        parent.kill()
    wait_until(lambda: has_ended(pid))
    assert not leftover.exists()
