"""The engine's process when the machine runs out of memory or of descriptors."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.engine_harness import RawClient, Recorder, fake_command, make_request, wait_until
from naiad.config import EngineConfig
from naiad.engine_process import EngineClient
from naiad.engine_process.protocol import Ready


@pytest.fixture
def folder() -> Iterator[Path]:
    """A private directory with a short path, because pytest's may be too long for a socket."""
    with tempfile.TemporaryDirectory(prefix="naiad-test-") as name:
        yield Path(name)


def test_the_engine_is_killed_before_the_server_when_memory_runs_out(folder: Path) -> None:
    socket = folder / "llm.engine"
    command = [sys.executable, "-m", "naiad.engine_process", "--socket", str(socket)]
    command += ["--parent-pid", str(os.getpid()), "--model-dir", str(folder)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        wait_until(socket.exists)
        own = int(Path("/proc/self/oom_score_adj").read_text(encoding="ascii"))
        its = int(Path(f"/proc/{process.pid}/oom_score_adj").read_text(encoding="ascii"))
        assert its == 500 > own
    finally:
        process.kill()
        process.wait()


def test_without_descriptors_new_clients_wait_and_old_ones_are_served(folder: Path) -> None:
    recorder = Recorder()
    client = EngineClient(
        EngineConfig(model_dir=str(folder)),
        folder / "llm.engine",
        recorder.on_outputs,
        recorder.on_lost,
        command=fake_command("good"),
    )
    client.start()
    try:
        child = client._child
        assert child is not None
        pid = child._process.pid
        limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (len(os.listdir(f"/proc/{pid}/fd")), limits[1]))
        waiting = [RawClient(folder / "llm.engine") for _ in range(3)]
        client.submit([make_request(1, first_id=10)])
        recorder.wait_finished(1)
        assert recorder.token_ids(1) == [10, 11, 12]
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
        for each in waiting:
            assert isinstance(each.receive(), Ready)
            each.close()
        assert recorder.num_losses == 0
    finally:
        client.close(timeout_s=5)
