"""When the OpenAI server beside the Triton server counts as ready."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest

from helpers.engine_harness import Recorder, fake_command
from helpers.ports import free_port
from helpers.server import eventually
from naiad.cli.serve import side_process
from naiad.cli.serve.side_process import SidePlan, SideProcess
from naiad.config import EngineConfig
from naiad.engine_process import EngineClient
from naiad.engine_process.runtime_dir import (
    remove_runtime_directory,
    runtime_directories_below,
    runtime_directory,
)
from naiad.errors import StartupError

HOST = "127.0.0.1"
ENGINE = "llm.0.engine"

PLAN = partial(SidePlan, name="the OpenAI server", module="naiad.openai_server", has_models=True)

Start = Callable[..., SideProcess]


@pytest.fixture
def directory() -> Iterator[Path]:
    """The runtime directory that this process would have as a Triton server."""
    path = runtime_directory(os.getpid())
    yield path
    remove_runtime_directory(path)


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def start(port: int) -> Iterator[Start]:
    started: list[SideProcess] = []

    common = (f"--server-pid={os.getpid()}", f"--host={HOST}", f"--port={port}")

    def run(*options: str) -> SideProcess:
        started.append(SideProcess(PLAN(host=HOST, port=port, options=(*common, *options))))
        started[-1].start()
        return started[-1]

    yield run
    for each in started:
        each.stop()


@pytest.fixture
def mute_engine(directory: Path) -> Iterator[None]:
    """An engine that accepts connections and says nothing."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(directory / ENGINE))
        listener.listen()
        yield


def go_on(seconds: float) -> bool:
    time.sleep(seconds)
    return False


def listed(port: int) -> list[str]:
    with urllib.request.urlopen(f"http://{HOST}:{port}/v1/models", timeout=10) as answer:
        return [model["id"] for model in json.load(answer)["data"]]


def health(port: int) -> int:
    try:
        with urllib.request.urlopen(f"http://{HOST}:{port}/health", timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_it_is_ready_when_it_lists_a_model_until_it_is_to_stop(
    start: Start, port: int, directory: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    recorder = Recorder()
    engine = EngineClient(
        EngineConfig(model_dir=str(directory)),
        directory / ENGINE,
        recorder.on_outputs,
        recorder.on_lost,
        command=fake_command("good"),
    )
    try:
        engine.start()
        process = start()
        process.wait_until_it_serves(go_on)
        assert listed(port) == ["fake"]
        assert health(port) == 200
        process.announce_stop()
        eventually(lambda: health(port) == 503)
        # It still answers what it can.
        assert listed(port) == ["fake"]
    finally:
        engine.close(timeout_s=0)
    assert "no model" not in capfd.readouterr().err


def test_without_an_engine_it_is_ready_when_it_listens(
    start: Start, port: int, directory: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    start().wait_until_it_serves(go_on)
    assert listed(port) == []
    engines = [path for each in runtime_directories_below(os.getpid()) for path in each.iterdir()]
    assert "no model" not in capfd.readouterr().err, engines


def test_an_engine_that_goes_is_not_waited_for(
    start: Start, directory: Path, mute_engine: None, capfd: pytest.CaptureFixture[str]
) -> None:
    process = start()

    def let_it_go(seconds: float) -> bool:
        if process._listens():
            (directory / ENGINE).unlink(missing_ok=True)
        return go_on(seconds)

    process.wait_until_it_serves(let_it_go)
    assert "no model" not in capfd.readouterr().err


@pytest.mark.usefixtures("mute_engine")
def test_a_model_that_does_not_come_is_a_warning(
    start: Start, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(side_process, "FIRST_MODEL_TIMEOUT_S", 0.5)
    start().wait_until_it_serves(go_on)
    assert "warning: the OpenAI server has no model 0.5 s after" in capfd.readouterr().err


@pytest.mark.usefixtures("mute_engine")
def test_a_signal_ends_the_wait_without_a_warning(start: Start, capfd: pytest.CaptureFixture[str]) -> None:
    start().wait_until_it_serves(lambda _seconds: True)
    assert "no model" not in capfd.readouterr().err


def test_a_server_that_ends_is_no_ready_one(start: Start) -> None:
    process = start("--reasoning=none-such")
    with pytest.raises(StartupError, match=r"did not start on 127\.0\.0\.1:\d+: exit code 2$"):
        process.wait_until_it_serves(go_on)


def test_another_program_on_the_port_is_not_taken_for_it(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    process = SideProcess(PLAN(host=HOST, port=port))
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as mute:
        process._process = mute
        with socket.create_server((HOST, port)):
            assert not process._listens()
            # Where the system does not tell who listens, whoever answers is taken for it.
            monkeypatch.setattr(psutil.Process, "net_connections", lambda *_: [])
            assert process._listens()
        mute.communicate(b"\n")


@pytest.mark.parametrize("module", ["naiad.openai_server", "naiad.gate"])
def test_a_server_whose_parent_ended_before_it_watched_ends(module: str, port: int) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    options = [f"--server-pid={os.getpid()}", f"--port={port}"]
    if module == "naiad.gate":
        names = (f"{side}{name}" for name in ("http", "grpc", "metrics") for side in ("", "server-"))
        options = [f"--{name}-port={free_port()}" for name in names]
    command = [sys.executable, "-m", module, f"--parent-pid={gone.pid}", f"--host={HOST}", *options]
    ended = subprocess.run(command, capture_output=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (1, b"")


def test_a_server_is_told_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def note(command: list[str], **options: object) -> None:
        commands.append(command)

    monkeypatch.setattr(side_process.subprocess, "Popen", note)
    plan = SidePlan(
        name="it", module="naiad.gate", host=HOST, port=1, options=("--port=1",), has_models=False
    )
    SideProcess(plan).start()
    assert f"--parent-pid={os.getpid()}" in commands[0]


def test_a_restart_that_gets_no_process_is_told_once_and_tried_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    num_refused = 0

    def refuse(command: list[str], **options: object) -> None:
        nonlocal num_refused
        num_refused += 1
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    process = SideProcess(PLAN(host=HOST, port=1))
    monkeypatch.setattr(side_process, "_FORK_RETRY_S", 0.0)
    monkeypatch.setattr(side_process.sys, "executable", "/bin/true")
    process.start()
    assert process._process is not None
    process._process.wait()
    with monkeypatch.context() as patched:
        patched.setattr(side_process.subprocess, "Popen", refuse)
        for _ in range(3):
            process.tend()
    assert num_refused == 3
    assert process._process is None
    process.tend()
    assert process._process is not None
    said = capsys.readouterr().err
    assert said.count("the OpenAI server can not be started now: Resource temporarily unavailable") == 1
    process.stop()
