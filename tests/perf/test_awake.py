from __future__ import annotations

import os
import signal
import subprocess
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


def autogroup(pid: int | str) -> str:
    path = Path(f"/proc/{pid}/autogroup")
    return path.read_text() if path.exists() else ""


@pytest.mark.skipif(not autogroup("self"), reason="this kernel does not group processes by session")
def test_where_sessions_share_the_time_a_loops_session_has_the_lowest_priority() -> None:
    before = set(psutil.Process().children())
    with cores_kept_awake():
        loops = set(psutil.Process().children()) - before
        assert len(loops) == len(os.sched_getaffinity(0))
        eventually(lambda: all(autogroup(loop.pid).split()[-1] == "19" for loop in loops))


_COUNT_LOOPS = """
import os, psutil, sys
others = [each for each in psutil.Process(os.getppid()).children() if each.pid != os.getpid()]
sys.exit(sum(any("sched_setscheduler" in word for word in each.cmdline()) for each in others))
"""


# A shell forgets an interrupt that comes while it waits for a command.
_ENDS_WITH_7 = """
import pathlib, signal, sys, time
def end(*_):
    time.sleep(1)
    sys.exit(7)
for number in signal.SIGINT, signal.SIGTERM:
    signal.signal(number, end)
pathlib.Path(sys.argv[1]).touch()
time.sleep(60)
"""


def run_awake(*command: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "perf.common.awake", *command])


@pytest.mark.parametrize("has_quota", [False, True])
def test_a_command_runs_beside_the_loops_unless_time_is_limited(
    monkeypatch: pytest.MonkeyPatch, has_quota: bool
) -> None:
    monkeypatch.setattr("perf.common.awake._has_quota", lambda: has_quota)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    assert main([sys.executable, "-c", _COUNT_LOOPS]) == (0 if has_quota else len(os.sched_getaffinity(0)))


def test_a_command_that_a_signal_ended_has_the_code_that_a_shell_gives() -> None:
    assert run_awake("bash", "-c", "kill -KILL $$").wait(30) == 128 + signal.SIGKILL


def test_without_a_command_there_is_nothing_to_run() -> None:
    assert main([]) == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_the_command_end_as_it_wants_to(tmp_path: Path, number: signal.Signals) -> None:
    begun = tmp_path / "begun"
    running = run_awake(sys.executable, "-c", _ENDS_WITH_7, str(begun))
    eventually(begun.exists)
    if number is signal.SIGINT:
        # As a terminal does: to all.
        for each in psutil.Process(running.pid).children():
            if str(begun) in each.cmdline():
                each.send_signal(number)
    running.send_signal(number)
    assert running.wait(30) == 7


def test_a_loop_that_dies_is_told_and_the_commands_code_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("perf.common.awake._LOOP", "raise SystemExit(1)")
    monkeypatch.setattr("perf.common.awake._has_quota", lambda: False)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    assert main([sys.executable, "-c", "import time; time.sleep(1); raise SystemExit(3)"]) == 3
    assert "ended by itself" in capsys.readouterr().err


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
