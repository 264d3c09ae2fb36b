from __future__ import annotations

import os

import psutil
from perf.common.awake import cores_kept_awake

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
