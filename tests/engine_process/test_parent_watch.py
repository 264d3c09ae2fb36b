from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from helpers.engine_harness import has_ended, wait_until

CHILD = """
import pathlib, sys, time
from naiad.parent_watch import end_with_parent

def before_exit():
    pathlib.Path(sys.argv[1]).unlink()
    if sys.argv[2] == "raises":
        raise RuntimeError

end_with_parent(before_exit)
print("watching", flush=True)
time.sleep(60)
"""
PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", *sys.argv[1:]], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("behaviour", ["returns", "raises"])
def test_process_ends_with_its_killed_parent(tmp_path: Path, behaviour: str) -> None:
    leftover = tmp_path / "leftover"
    leftover.touch()
    arguments = [sys.executable, "-c", PARENT, CHILD, str(leftover), behaviour]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert not has_ended(pid)
        parent.kill()
    wait_until(lambda: has_ended(pid))
    assert not leftover.exists()
