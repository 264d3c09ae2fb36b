"""What is looked at after each test would be noticed."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from helpers.raw_grpc import ENDLESS, Stream, llm_inputs
from helpers.resting import MORE_DESCRIPTORS, Resting
from helpers.server import Leaving, Server, eventually, live_servers, start_server


@pytest.fixture
def own_server(tiny_dir: Path, leaving: Leaving) -> Iterator[Server]:
    running = start_server(tiny_dir, "--dtype", "float32")
    yield running
    if running.process.poll() is None:
        leaving.take(running)


def test_what_runs_and_holds_blocks_is_seen(tiny: Server) -> None:
    stream = Stream(tiny.grpc, "llm", llm_inputs([1, 2, 3], ENDLESS) | {"ignore_eos": True})
    eventually(lambda: tiny.busy().keys() == {"vllm:num_requests_running", "vllm:kv_cache_usage_perc"})
    stream.cancel()
    eventually(lambda: not tiny.busy())


def test_a_server_is_looked_at_until_it_is_asked_to_stop(own_server: Server) -> None:
    assert own_server in live_servers()
    assert own_server.stop() == 0
    assert own_server not in live_servers()
    assert not own_server.busy()


def test_connections_that_stay_open_are_seen(tiny: Server, shared: dict[str, Resting]) -> None:
    resting = shared["tiny"]
    host, _, port = tiny.http.rpartition(":")
    with ExitStack() as stack:
        # Half of them may be of tests before, whose clients have left theirs open.
        for _ in range(2 * MORE_DESCRIPTORS):
            stack.enter_context(socket.create_connection((host, int(port))))
        eventually(lambda: any("tritonserver" in each for each in resting.grown()))
    eventually(lambda: not resting.grown())


def test_a_process_that_has_ended_is_seen(tiny: Server) -> None:
    with psutil.Popen(["sleep", "60"]) as process:
        resting = Resting(tiny, {psutil.Process(process.pid): 100}, set())
        process.kill()
        process.wait()
        assert resting.gone()
