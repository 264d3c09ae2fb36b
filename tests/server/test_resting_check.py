"""What is looked at after each file of tests would be noticed."""

from __future__ import annotations

import socket
from contextlib import ExitStack

import psutil

from helpers.raw_grpc import ENDLESS, Stream, llm_inputs
from helpers.resting import MORE_DESCRIPTORS, Resting
from helpers.server import Server, eventually


def test_what_runs_and_holds_blocks_is_seen(tiny: Server, shared: list[Resting]) -> None:
    (resting,) = [each for each in shared if each.server is tiny]
    stream = Stream(tiny.grpc, "llm", llm_inputs([1, 2, 3], ENDLESS) | {"ignore_eos": True})
    eventually(lambda: resting.busy().keys() == {"vllm:num_requests_running", "vllm:kv_cache_usage_perc"})
    stream.cancel()
    eventually(lambda: not resting.busy())


def test_connections_that_stay_open_are_seen(tiny: Server, shared: list[Resting]) -> None:
    (resting,) = [each for each in shared if each.server is tiny]
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
