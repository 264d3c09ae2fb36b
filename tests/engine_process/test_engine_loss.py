"""The engine process dies, fails, hangs; or its parent does."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.engine_harness import (
    FAKE_CHILD,
    WAIT_S,
    RawClient,
    Recorder,
    fake_command,
    has_ended,
    make_request,
    wait_until,
)
from helpers.fake_engine_child import FAILING_ID, SLOW_ID, STUCK_ID
from naiad.engine_process import EngineClient
from naiad.engine_process.clients import engine_child
from naiad.engine_process.clients.engine_connection import EngineConnection
from naiad.engine_process.observations import ObservationBatch
from naiad.engine_process.protocol import AddRequests, Observed, Ready
from naiad.errors import StartupError, UnavailableError
from naiad.sequence import FinishReason

MakeClient = Callable[..., tuple[EngineClient, Recorder]]
Served = tuple[EngineClient, Recorder]

OWNER = """
import pathlib, sys, time
from naiad.config import EngineConfig
from naiad.engine_process import EngineClient
socket_path = pathlib.Path(sys.argv[1])
client = EngineClient(
    EngineConfig(model_dir=str(socket_path.parent)),
    socket_path,
    lambda outputs, stats: None,
    lambda: None,
    command=[sys.executable, sys.argv[2], sys.argv[3]],
)
client.start()
print(client.pid, flush=True)
time.sleep(60)
"""


def kill_and_wait(client: EngineClient, recorder: Recorder) -> None:
    assert client.pid is not None
    os.kill(client.pid, signal.SIGKILL)
    recorder.wait_for(lambda: recorder.num_losses > 0)


def test_killed_engine_is_one_loss(served: Served) -> None:
    client, recorder = served
    client.submit([make_request(i, SLOW_ID, max_tokens=10**6) for i in range(8)])
    recorder.wait_started(7)
    kill_and_wait(client, recorder)
    wait_until(lambda: client.is_ready)
    assert recorder.num_losses == 1


def test_gauges_of_a_killed_engine_go_to_rest(make_client: MakeClient) -> None:
    client, recorder = make_client(first_backoff_s=30.0)
    client.start()
    client.submit([make_request(1, SLOW_ID, max_tokens=10**6)])
    recorder.wait_for(lambda: bool(recorder.stats) and recorder.stats[-1].num_running == 1)
    kill_and_wait(client, recorder)
    recorder.wait_for(lambda: recorder.stats[-1].num_running == 0)


def test_killed_engine_refuses_until_it_is_back(make_client: MakeClient) -> None:
    client, recorder = make_client(first_backoff_s=30.0)
    client.start()
    kill_and_wait(client, recorder)
    assert not client.is_ready
    with pytest.raises(UnavailableError, match="restarting"):
        client.submit([make_request(1, first_id=4)])


def test_killed_engine_serves_again(served: Served) -> None:
    client, recorder = served
    old_pid = client.pid
    kill_and_wait(client, recorder)
    wait_until(lambda: client.is_ready)
    # An idle engine is not considered dead.
    recorder.wait_for(lambda: recorder.stats[-1].max_num_seqs == 8)
    client.submit([make_request(1, first_id=4)])
    recorder.wait_finished(1)
    assert recorder.token_ids(1) == [4, 5, 6]
    assert client.pid != old_pid


def test_idle_engine_that_dies_is_replaced_too(served: Served) -> None:
    client, recorder = served
    kill_and_wait(client, recorder)
    wait_until(lambda: client.is_ready)
    kill_and_wait(client, recorder)
    recorder.wait_for(lambda: recorder.num_losses == 2)


def test_failed_restart_is_tried_again(make_client: MakeClient) -> None:
    client, recorder = make_client("fails-second-time", first_backoff_s=0.05)
    client.start()
    kill_and_wait(client, recorder)
    wait_until(lambda: client.is_ready)
    client.submit([make_request(1, first_id=4)])
    recorder.wait_finished(1)
    assert recorder.num_losses == 1


def test_a_restart_without_descriptors_is_tried_again(
    make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, recorder = make_client(first_backoff_s=0.05)
    client.start()
    attempts: list[Path] = []

    def connect(path: Path) -> EngineConnection:
        attempts.append(path)
        if len(attempts) <= 2:
            raise OSError(errno.EMFILE, "Too many open files")
        return EngineConnection(path)

    monkeypatch.setattr(engine_child, "EngineConnection", connect)
    kill_and_wait(client, recorder)
    wait_until(lambda: client.is_ready)
    assert len(attempts) > 2
    client.submit([make_request(1, first_id=4)])
    recorder.wait_finished(1)


def test_a_first_start_without_descriptors_says_so(
    make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect(_path: Path) -> EngineConnection:
        raise OSError(errno.EMFILE, "Too many open files")

    client, _ = make_client()
    monkeypatch.setattr(engine_child, "EngineConnection", connect)
    with pytest.raises(StartupError, match="no connection to the engine process can be made: Too many open"):
        client.start()
    assert client.pid is None


def test_exception_in_the_loop_answers_everybody(served: Served) -> None:
    client, recorder = served
    client.submit([make_request(1, SLOW_ID, max_tokens=10**6)])
    recorder.wait_started(1)
    client.submit([make_request(2, FAILING_ID), make_request(3, first_id=4)])
    recorder.wait_finished(1, 2, 3)
    ends = [recorder.outputs[i][-1] for i in (1, 2, 3)]
    assert {end.finish_reason for end in ends} == {FinishReason.ERROR}
    assert {(end.error_status, end.error_message) for end in ends} == {("INTERNAL", "the engine failed")}


def test_exception_in_the_loop_is_told_by_its_place_alone(
    make_client: MakeClient, capfd: pytest.CaptureFixture[str]
) -> None:
    client, recorder = make_client()
    client.start()
    client.submit([make_request(1, FAILING_ID)])
    recorder.wait_finished(1)
    said = capfd.readouterr().err
    assert "the engine loop failed: RuntimeError at helpers/fake_engine_child.py:" in said
    assert "secret" not in said


def test_engine_restarts_after_an_exception_in_its_loop(served: Served) -> None:
    client, recorder = served
    client.submit([make_request(1, FAILING_ID)])
    recorder.wait_for(lambda: recorder.num_losses == 1)
    wait_until(lambda: client.is_ready)
    client.submit([make_request(2, first_id=4)])
    recorder.wait_finished(2)
    assert recorder.token_ids(2) == [4, 5, 6]


def test_wedged_engine_is_killed_and_replaced(make_client: MakeClient) -> None:
    client, recorder = make_client(watchdog_s=1.0)
    client.start()
    old_pid = client.pid
    client.submit([make_request(1, STUCK_ID)])
    recorder.wait_for(lambda: recorder.num_losses == 1)
    wait_until(lambda: client.is_ready)
    assert client.pid != old_pid


def test_a_step_that_hangs_for_another_client_alone_is_seen(
    make_client: MakeClient, socket_dir: Path
) -> None:
    client, recorder = make_client(watchdog_s=1.0)
    client.start()
    other = RawClient(socket_dir / "llm.engine")
    assert isinstance(other.receive(), Ready)
    other.send(AddRequests([make_request(1, STUCK_ID)]))
    recorder.wait_for(lambda: recorder.num_losses == 1)
    wait_until(lambda: client.is_ready)
    other.close()


def test_messages_that_pass_a_hanging_step_do_not_hide_it(make_client: MakeClient, socket_dir: Path) -> None:
    client, recorder = make_client(watchdog_s=1.0)
    client.start()
    other = RawClient(socket_dir / "llm.engine")
    assert isinstance(other.receive(), Ready)
    client.submit([make_request(1, STUCK_ID)])

    def is_lost() -> bool:
        with contextlib.suppress(OSError):
            other.send(Observed(ObservationBatch([0.25])))
        return recorder.num_losses == 1

    wait_until(is_lost)
    other.close()


def test_watchdog_leaves_an_engine_alone_whose_other_client_has_been_served(
    make_client: MakeClient, socket_dir: Path
) -> None:
    client, recorder = make_client(watchdog_s=2.0)
    client.start()
    pid = client.pid
    other = RawClient(socket_dir / "llm.engine")
    assert isinstance(other.receive(), Ready)
    other.send(AddRequests([make_request(1, first_id=4)]))
    wait_until(lambda: client._is_busy)
    wait_until(lambda: not client._is_busy)
    time.sleep(2.5)
    assert (client.pid, recorder.num_losses) == (pid, 0)
    other.close()


def test_watchdog_leaves_an_idle_engine_alone(make_client: MakeClient) -> None:
    client, recorder = make_client(watchdog_s=2.0)
    client.start()
    pid = client.pid
    time.sleep(4.5)
    assert (client.pid, recorder.num_losses) == (pid, 0)


def test_an_engine_that_is_stopped_while_it_is_idle_is_replaced(make_client: MakeClient) -> None:
    client, recorder = make_client(watchdog_s=1.0)
    client.start()
    old_pid = client.pid
    assert old_pid is not None
    os.kill(old_pid, signal.SIGSTOP)
    recorder.wait_for(lambda: recorder.num_losses == 1)
    wait_until(lambda: client.is_ready)
    assert client.pid != old_pid


def test_work_without_a_step_is_seen_even_if_the_engine_answers(make_client: MakeClient) -> None:
    client, recorder = make_client(watchdog_s=1.0)
    client.start()
    client._outstanding.add(1)  # as if the engine had lost it
    recorder.wait_for(lambda: recorder.num_losses == 1)


def test_ctrl_c_does_not_reach_the_engine(served: Served) -> None:
    client, recorder = served
    assert client.pid is not None
    os.kill(client.pid, signal.SIGINT)
    client.submit([make_request(1, first_id=4)])
    recorder.wait_finished(1)
    assert recorder.num_losses == 0


def test_sigterm_ends_the_engine_even_inside_a_step(make_client: MakeClient, socket_dir: Path) -> None:
    client, recorder = make_client(first_backoff_s=30.0)
    client.start()
    client.submit([make_request(1, STUCK_ID)])
    pid = client.pid
    assert pid is not None
    os.kill(pid, signal.SIGTERM)
    recorder.wait_for(lambda: recorder.num_losses == 1)
    wait_until(lambda: has_ended(pid))
    assert not (socket_dir / "llm.engine").exists()


@pytest.mark.parametrize("is_busy", [False, True])
def test_engine_ends_with_its_killed_parent(socket_dir: Path, is_busy: bool) -> None:
    path = socket_dir / "llm.engine"
    arguments = [sys.executable, "-c", OWNER, str(path), str(FAKE_CHILD), "good"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        if is_busy:
            other = RawClient(path)
            assert isinstance(other.receive(), Ready)
            other.send(AddRequests([make_request(1, STUCK_ID)]))
        owner.kill()
    wait_until(lambda: has_ended(pid))
    assert not path.exists()


def test_engine_without_an_owner_ends_with_its_parent(socket_dir: Path) -> None:
    spawn = "import subprocess, sys, os, time; p = subprocess.Popen([*sys.argv[1:], str(os.getpid())])\n"
    spawn += "print(p.pid, flush=True); time.sleep(60)"
    path = socket_dir / "llm.engine"
    options = ["--socket", str(path), "--model-dir", str(socket_dir), "--parent-pid"]
    arguments = [sys.executable, "-c", spawn, *fake_command("never-ready"), *options]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        wait_until(path.exists)
        parent.kill()
    wait_until(lambda: has_ended(pid))
    assert not path.exists()


def test_engine_ends_when_its_owner_disconnects(socket_dir: Path) -> None:
    path = socket_dir / "llm.engine"
    options = ["--socket", str(path), "--model-dir", str(socket_dir), "--parent-pid", str(os.getpid())]
    with subprocess.Popen([*fake_command("good"), *options]) as process:
        other = RawClient(path)
        assert isinstance(other.receive(), Ready)
        other.close()
        try:
            assert process.wait(WAIT_S) == 0
        finally:
            process.kill()
    assert not path.exists()
