"""What `naiad serve` allows with and without keys, and what SIGHUP does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from helpers.server import eventually
from naiad.cli.main import main
from naiad.cli.serve.stop_signal import StopSignal
from naiad.openai_server.__main__ import parse
from naiad.openai_server.access.key_file import digest_of

ANYWHERE = "0.0.0.0"


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"keys": [{"name": "a", "sha256": digest_of("a"), "tenant": "a"}]}))
    path.chmod(0o600)
    return path


def refusal(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """The last line of a `naiad serve` that does not start; at the latest there is no such model."""
    ports = ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"]
    openai = () if "--openai-port" in options else ("--openai-port", "0")
    assert main(["serve", "--model", "/no/such/model", *ports, *openai, *options]) == 1
    return capsys.readouterr().err.splitlines()[-1]


def is_allowed(line: str) -> bool:
    return "/no/such/model" in line


def test_a_host_that_others_reach_needs_keys(capsys: pytest.CaptureFixture[str], keys: Path) -> None:
    line = refusal(capsys, "--openai-host", ANYWHERE)
    assert (
        line == f"naiad: error: --openai-host = '{ANYWHERE}': expected a loopback address, or --api-keys FILE"
    )
    assert is_allowed(refusal(capsys, "--openai-host", ANYWHERE, "--api-keys", str(keys)))


def test_keys_keep_triton_on_loopback(capsys: pytest.CaptureFixture[str], keys: Path) -> None:
    with_keys = ("--api-keys", str(keys), "--host", ANYWHERE)
    line = refusal(capsys, *with_keys)
    assert "--host = '0.0.0.0': expected a loopback address" in line
    assert "--expose-triton" in line
    assert is_allowed(refusal(capsys, *with_keys, "--expose-triton"))
    assert is_allowed(refusal(capsys, "--host", ANYWHERE))


def test_keys_without_an_api_are_refused(capsys: pytest.CaptureFixture[str], keys: Path) -> None:
    line = refusal(capsys, "--api-keys", str(keys), "--openai-port", "off")
    assert f"--api-keys = '{keys}': expected none with --openai-port off" in line


def test_a_wrong_file_is_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str], keys: Path
) -> None:
    keys.chmod(0o666)
    assert f"--api-keys {keys}: mode = 0666" in refusal(capsys, "--api-keys", str(keys))


def test_the_server_itself_refuses_an_open_host_without_keys(keys: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "naiad.openai_server",
        "--server-pid",
        "1",
        "--port",
        "0",
        "--host",
        ANYWHERE,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.endswith(
        "Z ERROR naiad openai: --host = '0.0.0.0': expected a loopback address, or --api-keys\n"
    )
    words = [*command[3:], "--api-keys", str(keys), "--metrics-open"]
    _, gate, host, _ = parse(words)
    assert gate is not None
    assert host == ANYWHERE


@pytest.fixture
def hang_up_is() -> Iterator[Callable[[signal.Handlers], None]]:
    """Sets what this process does on SIGHUP; afterwards it is as before."""
    before = signal.getsignal(signal.SIGHUP)

    def set_to(handler: signal.Handlers) -> None:
        signal.signal(signal.SIGHUP, handler)

    yield set_to
    signal.signal(signal.SIGHUP, before)


def test_sighup_stops_unless_there_is_something_to_read_again(
    hang_up_is: Callable[[signal.Handlers], None],
) -> None:
    hang_up_is(signal.SIG_DFL)
    reloads = []
    with StopSignal() as stop:
        stop.on_reload = lambda: reloads.append(1)
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGHUP)
        assert not stop.wait(0.05)
        assert len(reloads) == 3
        stop.on_reload = None
        os.kill(os.getpid(), signal.SIGHUP)
        assert stop.wait(5)


def test_sighup_never_stops_what_nohup_started(hang_up_is: Callable[[signal.Handlers], None]) -> None:
    hang_up_is(signal.SIG_IGN)
    reloads = []
    with StopSignal() as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        assert not stop.wait(0.05)
        stop.on_reload = lambda: reloads.append(1)
        os.kill(os.getpid(), signal.SIGHUP)
        assert not stop.wait(0.05)
        assert reloads == [1]
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.wait(5)
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


_IN_A_TERMINAL = """
import os, signal, sys
signal.signal(signal.SIGHUP, getattr(signal, sys.argv[2]))
os.open(sys.argv[1], os.O_RDWR)
from naiad.cli.serve.stop_signal import StopSignal
with StopSignal() as stop:
    stop.on_reload = lambda: print("again", flush=True)
    print("ready", flush=True)
    while not stop.wait(60):
        pass
    print("stopped", flush=True)
"""


@pytest.mark.parametrize("is_ignored", [False, True])
def test_a_closed_terminal_stops_all_the_same_unless_nohup_was_used(is_ignored: bool) -> None:
    controller, terminal = os.openpty()
    hang_up = "SIG_IGN" if is_ignored else "SIG_DFL"
    command = [sys.executable, "-c", _IN_A_TERMINAL, os.ttyname(terminal), hang_up]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    os.close(terminal)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGHUP)
    assert process.stdout.readline() == "again\n"
    os.close(controller)
    if is_ignored:
        assert process.stdout.readline() == "again\n"
        process.terminate()
    assert process.stdout.readline() == "stopped\n"
    assert process.wait(30) == 0


def test_a_signal_before_the_handler_waits_for_it() -> None:
    """As `SideProcess` starts the server: with the signal blocked."""
    script = (
        "import signal, sys, time\nprint('ready', flush=True)\nsys.stdin.readline()\n"
        "signal.signal(signal.SIGHUP, lambda *_: print('again', flush=True))\n"
        "signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})\n"
    )
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGHUP)
    out, _ = process.communicate("\n", timeout=30)
    assert (out, process.returncode) == ("again\n", 0)
    eventually(lambda: process.poll() is not None)
