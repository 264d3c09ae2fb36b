from __future__ import annotations

import os
import sys
from pathlib import Path

import psutil
import pytest
from perf.common.awake import _has_quota, cores_kept_awake, main

from helpers.server import eventually, gone


def test_each_core_has_a_loop_of_the_lowest_priority_as_long_as_it_is_asked_for() -> None:
    cores = os.sched_getaffinity(0)
    before = set(psutil.Process().children())
    with cores_kept_awake():
        loops = set(psutil.Process().children()) - before
        eventually(
            lambda: {tuple(os.sched_getaffinity(loop.pid)) for loop in loops} == {(core,) for core in cores}
        )
        eventually(lambda: {os.sched_getscheduler(loop.pid) for loop in loops} == {os.SCHED_IDLE})
    assert gone(list(loops))


def test_a_command_is_run_so_and_its_exit_code_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perf.common.awake._has_quota", lambda: False)
    count = "import os, psutil, sys; sys.exit(len(psutil.Process(os.getppid()).children()))"
    before = len(psutil.Process().children())
    # The command itself is one of them.
    assert main([sys.executable, "-c", count]) == before + len(os.sched_getaffinity(0)) + 1


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, False),
        ({"cpu.max": "max 100000\n"}, False),
        ({"cpu.max": "200000 100000\n"}, True),
        ({"cpu/cpu.cfs_quota_us": "-1\n"}, False),
        ({"cpu/cpu.cfs_quota_us": "50000\n"}, True),
    ],
)
def test_a_quota_is_seen(tmp_path: Path, files: dict[str, str], expected: bool) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert _has_quota(tmp_path) is expected
