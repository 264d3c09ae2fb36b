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


def test_a_process_whose_parent_has_ended_before_it_watches_ends() -> None:
    """Its imports may take seconds; the process that it belongs to is not whoever its parent is then."""
    with subprocess.Popen([sys.executable, "-c", ""]) as parent:
        parent.wait()
    code = f"import time; from naiad.parent_watch import end_with_parent as end; end(print, {parent.pid})"
    done = subprocess.run([sys.executable, "-c", f"{code}; time.sleep(60)"], timeout=50, check=False)
    assert done.returncode == 1
