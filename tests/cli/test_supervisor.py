"""The supervisor and its guard with a fake server."""

from __future__ import annotations

import http.server
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from helpers.ports import free_port
from helpers.server import eventually, gone
from naiad.cli.serve.runtime_folder import region_prefix
from naiad.cli.serve.server_files import STUB_NAME
from naiad.cli.serve.server_log import ServerLog, find_cause
from naiad.cli.serve.server_process import ServerProcess, _ending
from naiad.engine_process.protocol import StopServing, client_message_decoder
from naiad.frames import FrameBuffer

SCRIPT = Path(__file__).parents[1] / "helpers" / "supervise_fake.py"


class Supervised:
    """The supervisor's process and its output."""

    def __init__(self, runtime_dir: Path, *words: str, stderr: int = subprocess.STDOUT) -> None:
        self.port = free_port()
        command = [sys.executable, str(SCRIPT), str(self.port), str(runtime_dir), *words]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())

    def wait_for(self, words: str) -> None:
        eventually(lambda: any(words in line for line in self.lines), 30)

    def wait(self) -> int:
        code = self.process.wait(30)
        self._reader.join(10)
        return code

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


Start = Callable[..., Supervised]


@pytest.fixture
def runtime_dir(tmp_path: Path) -> Path:
    path = tmp_path / "runtime"
    path.mkdir()
    return path


@pytest.fixture
def start(runtime_dir: Path) -> Iterator[Start]:
    started: list[Supervised] = []

    def run(*words: str, stderr: int = subprocess.STDOUT) -> Supervised:
        started.append(Supervised(runtime_dir, *words, stderr=stderr))
        return started[-1]

    yield run
    for each in started:
        each.process.kill()
        each.process.wait()


def assert_drains_only_after(supervised: Supervised, done: Path) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        supervised.process.wait(2)
    assert "drained" not in supervised.lines
    done.touch()
    assert supervised.wait() == 0
    assert "drained" in supervised.lines


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_drains_and_exits_with_0(start: Start, number: signal.Signals) -> None:
    supervised = start("slow-exit")
    supervised.wait_for("ready")
    processes = supervised.descendants()
    supervised.process.send_signal(number)
    assert supervised.wait() == 0
    assert "drained" in supervised.lines
    eventually(lambda: gone(processes))


def test_what_runs_beside_the_server_is_told_before_the_drain(start: Start) -> None:
    supervised = start("beside")
    supervised.wait_for("ready")
    supervised.process.send_signal(signal.SIGTERM)
    assert supervised.wait() == 0
    # Two processes write to one pipe, so that a line of one may begin behind one of the other.
    assert any("beside: not ready" in line for line in supervised.lines)


def test_requests_are_taken_until_load_balancers_had_the_time_to_notice(start: Start) -> None:
    supervised = start("beside", "delay")
    supervised.wait_for("ready")
    asked_s = time.monotonic()
    supervised.process.send_signal(signal.SIGTERM)
    supervised.wait_for("beside: not ready")
    supervised.wait_for("new requests are refused")
    assert time.monotonic() - asked_s >= 1
    assert supervised.wait() == 0


def test_a_server_that_ends_before_its_delay_is_over_is_not_waited_for(start: Start) -> None:
    supervised = start("delay")
    supervised.wait_for("ready")
    program = str(SCRIPT.with_name("fake_tritonserver.py"))
    server = next(each for each in supervised.descendants() if each.cmdline()[1:2] == [program])
    supervised.process.send_signal(signal.SIGTERM)
    supervised.wait_for("stopping in 1 s")
    server.kill()
    assert supervised.wait() == 0


def test_a_second_signal_does_not_cut_the_drain_short(start: Start) -> None:
    supervised = start("slow-exit")
    supervised.wait_for("ready")
    supervised.process.send_signal(signal.SIGINT)
    supervised.wait_for("stopping")
    supervised.process.send_signal(signal.SIGINT)
    assert supervised.wait() == 0
    assert "drained" in supervised.lines


def test_a_server_that_does_not_stop_with_requests_in_it_is_killed(start: Start) -> None:
    supervised = start("deaf", "busy-for-ever")
    supervised.wait_for("ready")
    processes = supervised.descendants()
    supervised.process.send_signal(signal.SIGTERM)
    assert supervised.wait() == 1
    assert any("cut off" in line for line in supervised.lines)
    eventually(lambda: gone(processes))


def test_a_server_that_does_not_stop_when_all_is_done_is_killed_with_exit_code_0(start: Start) -> None:
    supervised = start("deaf")
    supervised.wait_for("ready")
    processes = supervised.descendants()
    supervised.process.send_signal(signal.SIGTERM)
    assert supervised.wait() == 0
    eventually(lambda: gone(processes))


@pytest.mark.parametrize("metrics", ["busy-until", "mute-until"])
def test_the_server_is_stopped_only_when_its_metrics_say_that_all_requests_have_finished(
    start: Start, tmp_path: Path, metrics: str
) -> None:
    supervised = start("slow-exit", metrics, str(tmp_path / "done"))
    supervised.wait_for("ready")
    supervised.process.send_signal(signal.SIGTERM)
    supervised.wait_for("stopping")
    assert_drains_only_after(supervised, tmp_path / "done")


def test_a_supervisor_that_was_stopped_for_a_moment_does_not_take_that_for_a_moment_without_requests(
    start: Start, tmp_path: Path
) -> None:
    supervised = start("slow-exit", "busy-until", str(tmp_path / "done"))
    supervised.wait_for("ready")
    supervised.process.send_signal(signal.SIGTERM)
    supervised.wait_for("stopping")
    for _ in range(3):
        supervised.process.send_signal(signal.SIGSTOP)
        time.sleep(0.6)
        supervised.process.send_signal(signal.SIGCONT)
        time.sleep(0.1)
    assert_drains_only_after(supervised, tmp_path / "done")


def test_requests_that_finished_while_the_supervisor_was_stopped_are_not_called_cut_off(
    start: Start, tmp_path: Path
) -> None:
    supervised = start("slow-exit", "short", "busy-until", str(tmp_path / "done"))
    supervised.wait_for("ready")
    supervised.process.send_signal(signal.SIGTERM)
    supervised.wait_for("stopping")
    supervised.process.send_signal(signal.SIGSTOP)
    (tmp_path / "done").touch()
    time.sleep(3)  # the deadline is 2 s
    supervised.process.send_signal(signal.SIGCONT)
    assert supervised.wait() == 0
    assert not any("cut off" in line for line in supervised.lines)


def test_requests_that_do_not_finish_in_time_are_given_up(start: Start) -> None:
    supervised = start("slow-exit", "busy-for-ever")
    supervised.wait_for("ready")
    supervised.process.send_signal(signal.SIGTERM)
    assert supervised.wait() == 0
    assert any("cut off" in line for line in supervised.lines)


def test_the_engine_is_notified_before_the_server_stops(start: Start, tmp_path: Path) -> None:
    supervised = start("slow-exit", "engine", str(tmp_path / "told"))
    supervised.wait_for("ready")
    supervised.process.send_signal(signal.SIGTERM)
    assert supervised.wait() == 0
    (message,) = FrameBuffer().feed((tmp_path / "told").read_bytes())
    told = client_message_decoder.decode(message)
    assert isinstance(told, StopServing)
    assert 10 < told.timeout_s <= 20


@pytest.mark.parametrize("reader", ["gone", "full"])
def test_the_drain_needs_nobody_who_reads_the_messages(start: Start, tmp_path: Path, reader: str) -> None:
    """Ctrl-C also ends the `tee` behind `naiad serve`, and a disk may fill up."""
    if reader == "gone":
        read_fd, write_fd = os.pipe()
        os.close(read_fd)
    else:
        write_fd = os.open("/dev/full", os.O_WRONLY)
    told, written = tmp_path / "told", tmp_path / "written"
    try:
        supervised = start("slow-exit", "engine", str(told), "chatty", str(written), stderr=write_fd)
    finally:
        os.close(write_fd)
    supervised.wait_for("ready")
    # It is more than the server's pipe holds, so the supervisor has gone on reading.
    eventually(written.exists)
    supervised.process.send_signal(signal.SIGINT)
    assert supervised.wait() == 0
    (message,) = FrameBuffer().feed(told.read_bytes())
    assert isinstance(client_message_decoder.decode(message), StopServing)


def test_a_line_that_can_not_be_taken_does_not_end_the_reading(runtime_dir: Path) -> None:
    lines: list[str] = []

    def take(line: str) -> None:
        lines.append(line)
        if line == "1":
            raise RuntimeError("can't start new thread")

    command = ["bash", "-c", "echo 1; echo 2"]
    server = ServerProcess(command, dict(os.environ), runtime_dir, ServerLog(take, hold=False))
    eventually(lambda: server.poll() is not None)
    assert lines == ["1", "2"]


def test_a_failed_start_says_the_cause_and_what_else_was_printed(start: Start) -> None:
    supervised = start("fail")
    assert supervised.wait() == 1
    assert supervised.lines == [
        "naiad: error: the server did not start: dtype = 'int3': expected one of auto",
        "  something else",
    ]


def test_a_model_that_dies_before_the_first_probe_fails_the_start(start: Start) -> None:
    """The server goes on and calls itself ready, so waiting for it would never end."""
    supervised = start("dead-model")
    assert supervised.wait() == 1
    (line,) = supervised.lines
    assert line == "naiad: error: the server did not start: llm: Stub process 'llm_0_0' is not healthy."


@pytest.mark.parametrize(
    ("behaviour", "how"), [("dead-stub", "ended with exit status 0"), ("gone-stub", "ended")]
)
def test_a_stub_that_dies_while_the_server_waits_for_it_fails_the_start(
    start: Start, tmp_path: Path, behaviour: str, how: str
) -> None:
    supervised = start(behaviour, str(tmp_path))
    assert supervised.wait() == 1
    (line,) = supervised.lines
    said = f"the process of a model (the Python backend's stub) {how}, and the server still waits for it"
    assert line == f"naiad: error: the server did not start: {said}"


def test_a_start_without_progress_is_given_up(start: Start) -> None:
    supervised = start("starts-for-ever")
    assert supervised.wait() == 1
    (line,) = supervised.lines
    assert "the server did not start: it made no progress for 3 s" in line


def test_a_program_that_ends_in_silence_is_named(start: Start) -> None:
    supervised = start("silent")
    assert supervised.wait() == 1
    (line,) = supervised.lines
    assert f"{sys.executable} ended with exit code 1 and printed nothing: check that" in line


def test_a_program_that_is_killed_is_not_called_the_wrong_program(start: Start) -> None:
    supervised = start("killed")
    assert supervised.wait() == 1
    (line,) = supervised.lines
    assert f"{sys.executable} was ended by SIGKILL, perhaps because the machine has no memory left" in line


def test_a_program_that_can_not_be_run_is_a_failed_start(tmp_path: Path, runtime_dir: Path) -> None:
    log = ServerLog(print, hold=True)
    server = ServerProcess([str(tmp_path / "nothing")], dict(os.environ), runtime_dir, log)
    eventually(lambda: server.poll() is not None)
    assert "nothing can not be run" in (find_cause(log.held()) or "")


def test_a_process_that_a_stub_forks_is_no_stub(tmp_path: Path, runtime_dir: Path) -> None:
    """Between fork and exec it looks like one, and a start would be given up because it ended."""
    stub, child, fifo = (tmp_path / name for name in (STUB_NAME, "child", "fifo"))
    stub.symlink_to("/bin/bash")
    os.mkfifo(fifo)
    script = f"(echo $BASHPID > '{child}'; read < '{fifo}') & wait"
    server = ServerProcess(
        [str(stub), "-c", script], dict(os.environ), runtime_dir, ServerLog(print, hold=True)
    )
    try:
        eventually(lambda: child.exists() and child.read_text().endswith("\n"))
        forked = psutil.Process(int(child.read_text()))
        assert Path(forked.cmdline()[0]).name == STUB_NAME
        assert list(server.start_sight().stubs) == [forked.ppid()]
        assert server.num_stubs() == 1
    finally:
        server.kill(10)


def test_the_backends_trial_run_of_a_stub_is_no_stub(tmp_path: Path, runtime_dir: Path) -> None:
    """It has no arguments and ends at once, and a start would be given up because it ended."""
    stub, child, fifo = (tmp_path / name for name in (STUB_NAME, "child", "fifo"))
    stub.symlink_to("/bin/cat")
    os.mkfifo(fifo)
    command = ["bash", "-c", f"'{stub}' < '{fifo}' & echo $! > '{child}'; wait"]
    server = ServerProcess(command, dict(os.environ), runtime_dir, ServerLog(print, hold=True))
    try:
        with fifo.open("w"):
            eventually(lambda: child.exists() and child.read_text().endswith("\n"))
            trial = psutil.Process(int(child.read_text()))
            eventually(lambda: trial.cmdline() == [str(stub)])
            sight = server.start_sight()
            assert (dict(sight.stubs), dict(sight.dead_stubs), server.num_stubs()) == ({}, {}, 0)
    finally:
        server.kill(10)


def test_a_server_that_ends_by_itself_is_restarted(start: Start, tmp_path: Path) -> None:
    supervised = start("crash-once", str(tmp_path / "flag"))
    supervised.wait_for("restarting the server: it ended by itself with exit code 3")
    supervised.wait_for("the server serves again")
    supervised.process.send_signal(signal.SIGTERM)
    assert supervised.wait() == 0
    # So `naiad serve` sees before each start what of the repository has changed.
    assert "".join(supervised.lines).count("making the command") == 2


def test_how_a_process_ended_is_told_whatever_it_is_called(tmp_path: Path) -> None:
    program = os.fsencode(tmp_path) + b"/\xff"
    os.symlink("/bin/false", program)
    process = subprocess.Popen([program])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    try:
        assert _ending(process.pid) == " with exit status 1"
    finally:
        process.wait()


def test_processes_that_outlive_the_server_are_killed(start: Start, tmp_path: Path) -> None:
    supervised = start("child", str(tmp_path / "pid"))
    supervised.wait_for("ready")
    child = psutil.Process(int((tmp_path / "pid").read_text()))
    supervised.process.send_signal(signal.SIGTERM)
    assert supervised.wait() == 0
    eventually(lambda: gone([child]))


def test_a_killed_supervisor_takes_everything_along(start: Start, tmp_path: Path, runtime_dir: Path) -> None:
    name = f"triton_python_backend_shm_region_{uuid.uuid4()}"
    supervised = start("deaf", "child", str(tmp_path / "pid"), "shm", name)
    supervised.wait_for("ready")
    processes = supervised.descendants()
    assert Path("/dev/shm", name).exists()
    supervised.process.kill()
    eventually(lambda: gone(processes))
    eventually(lambda: not Path("/dev/shm", name).exists())
    eventually(lambda: not runtime_dir.exists())


def test_a_killed_guard_takes_the_server_along(start: Start) -> None:
    supervised = start("deaf")
    supervised.wait_for("ready")
    guard, server = supervised.descendants()
    assert "naiad.cli.serve.server_guard" in guard.cmdline()
    guard.kill()
    eventually(lambda: gone([server]))
    supervised.wait_for("restarting the server")


def test_the_next_server_removes_the_regions_that_a_killed_guard_leaves(
    start: Start, runtime_dir: Path
) -> None:
    region = Path("/dev/shm", f"{region_prefix(runtime_dir)}{uuid.uuid4()}")
    supervised = start()
    supervised.wait_for("ready")
    region.touch()
    supervised.descendants()[0].kill()
    supervised.wait_for("the server serves again")
    assert not region.exists()


def test_a_signal_before_the_server_is_ready_stops_it(start: Start, runtime_dir: Path) -> None:
    supervised = start()
    eventually(lambda: bool(supervised.descendants()))
    supervised.process.send_signal(signal.SIGTERM)
    assert supervised.wait() == 0


class Stranger(http.server.BaseHTTPRequestHandler):
    """Answers as another server that is ready."""

    num_asked = 0

    def do_GET(self) -> None:
        is_ready = self.path == "/v2/health/ready"
        Stranger.num_asked += is_ready
        self.send_response(200 if is_ready else 404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Quiet."""


def test_another_server_on_the_port_is_not_taken_for_the_own(start: Start, tmp_path: Path) -> None:
    (tmp_path / "flag").touch()
    supervised = start("absent", str(tmp_path / "flag"))
    with http.server.HTTPServer(("127.0.0.1", supervised.port), Stranger) as stranger:
        threading.Thread(target=stranger.serve_forever, daemon=True).start()
        # A server that is ready is not asked for it again.
        eventually(lambda: Stranger.num_asked >= 3, 30)
        supervised.process.send_signal(signal.SIGTERM)
        assert supervised.wait() == 0
        stranger.shutdown()
    assert "ready" not in supervised.lines


def wait_for_a_restart(supervised: Supervised, flag: Path) -> list[psutil.Process]:
    """Wait until the second server runs, which does not become ready; return the new processes."""
    supervised.wait_for("ready")
    first = supervised.descendants()
    supervised.wait_for("restarting the server: it ended by itself with exit code 3")
    eventually(lambda: len([each for each in supervised.descendants() if each not in first]) == 2)
    eventually(flag.with_suffix(".again").exists)
    return supervised.descendants()


def test_a_signal_while_a_restarted_server_takes_requests_drains_it(start: Start, tmp_path: Path) -> None:
    flag, done = tmp_path / "flag", tmp_path / "done"
    supervised = start("slow-exit", "crash-once", str(flag), "unready", str(flag), "busy-until", str(done))
    processes = wait_for_a_restart(supervised, flag)
    supervised.process.send_signal(signal.SIGTERM)
    supervised.wait_for("stopping")
    assert_drains_only_after(supervised, done)
    eventually(lambda: gone(processes))


def test_a_signal_while_a_server_restarts_lets_it_exit_by_itself(start: Start, tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    supervised = start("slow-exit", "crash-once", str(flag), "absent", str(flag))
    processes = wait_for_a_restart(supervised, flag)
    supervised.process.send_signal(signal.SIGTERM)
    assert supervised.wait() == 0
    assert "drained" in supervised.lines
    eventually(lambda: gone(processes))


def test_a_restarting_server_that_does_not_stop_is_killed(start: Start, tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    supervised = start("deaf", "crash-once", str(flag), "absent", str(flag))
    processes = wait_for_a_restart(supervised, flag)
    supervised.process.send_signal(signal.SIGTERM)
    assert supervised.wait() == 0
    assert "naiad: warning: the server does not stop: killing it" in supervised.lines
    eventually(lambda: gone(processes))
