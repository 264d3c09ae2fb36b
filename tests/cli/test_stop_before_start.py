"""What a signal does to `naiad serve` while it checks and downloads, before it starts a server."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from naiad.cli.checkpoints.complete_directory import exclusive_lock
from naiad.cli.serve import command
from naiad.cli.serve.ports import KeptPorts
from naiad.cli.serve.stop_signal import Stopped, StopSignal
from naiad.config.model_location import default_model_dir

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
PORTS = ("--http-port=0", "--grpc-port=0", "--metrics-port=0", "--openai-port=off")


@pytest.fixture(autouse=True)
def _without_nohup() -> Iterator[None]:
    """Tests that `nohup` has started: a process that it starts survives SIGHUP."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def set_timers(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The times after which this process would be ended; it is not."""
    seconds: list[float] = []
    monkeypatch.setattr(signal, "setitimer", lambda _, each: seconds.append(each))
    return seconds


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_ends_a_command_that_waits_for_its_model(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    directory = default_model_dir()
    directory.parent.mkdir(parents=True)
    words = [sys.executable, "-m", "naiad.cli.main", "serve", "--model", "default", *PORTS]
    with exclusive_lock(directory, print):
        process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, start_new_session=True)
        assert process.stderr is not None
        while "another process makes" not in (line := process.stderr.readline()):
            assert line, "it ended by itself"
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 0
    (line,) = said.splitlines()
    assert line.endswith(" INFO naiad: stopped before a server was started")


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_that_ends_at_once_is_raised(number: signal.Signals, set_timers: list[float]) -> None:
    before = signal.getsignal(signal.SIGALRM)
    try:
        with StopSignal() as stop:
            stop.ends_at_once = True
            with pytest.raises(Stopped):
                os.kill(os.getpid(), number)
            assert stop.is_set
    finally:
        signal.signal(signal.SIGALRM, before)
    assert len(set_timers) == 1


@pytest.mark.parametrize("has_keys", [True, False])
def test_sighup_stops_only_without_keys_to_read_again(
    has_keys: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, set_timers: list[float]
) -> None:
    def hang_up(_: argparse.Namespace, stop: StopSignal, __: KeptPorts) -> int:
        os.kill(os.getpid(), signal.SIGHUP)
        assert not stop.is_set
        return 7

    monkeypatch.setattr(command, "_serve", hang_up)
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    words = ["--api-keys", str(tmp_path / "keys")] if has_keys else []
    before = signal.getsignal(signal.SIGALRM)
    try:
        assert command.run(parser.parse_args(words)) == (7 if has_keys else 0)
    finally:
        signal.signal(signal.SIGALRM, before)


_WITH_A_DOWNLOAD = """
import threading
from concurrent.futures import ThreadPoolExecutor
from naiad.cli.serve.stop_signal import StopSignal, Stopped
try:
    with StopSignal() as stop, ThreadPoolExecutor() as pool:
        stop.ends_at_once = True
        download = pool.submit(threading.Event().wait)
        print("ready", flush=True)
        download.result()
except Stopped:
    print("not reached: the pool waits for its thread")
"""


def test_a_thread_that_downloads_does_not_keep_the_command() -> None:
    process = subprocess.Popen([sys.executable, "-c", _WITH_A_DOWNLOAD], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.terminate()
    assert process.communicate(timeout=60)[0] == ""
    assert process.returncode == 0


def test_ctrl_c_is_left_to_the_command_above(tmp_path: Path) -> None:
    """A download that the terminal's Ctrl-C ended would be taken for one that failed."""
    (tmp_path / "work.py").write_text("print('ready', flush=True)\nprint(input(), flush=True)\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "naiad.cli.checkpoints.with_parent", "work"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{tmp_path}"},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate("done\n", timeout=60)[0] == "done\n"
    assert process.returncode == 0
