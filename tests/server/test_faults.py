"""Killed processes: clients get an error, the service recovers by itself, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from helpers.raw_grpc import ENDLESS, Stream, ask, text_inputs
from helpers.served import served
from helpers.server import Leaving, Server, eventually, gone, start_server
from naiad.cli.serve.shared_memory import mapped_regions

TWO = text_inputs("Hello", 4, ignore_eos=True)


@pytest.fixture(scope="module")
def lasting(tiny_dir: Path, leaving: Leaving) -> Iterator[Server]:
    """A server that serves again after each test; the last test stops it."""
    running = start_server(tiny_dir, "--dtype", "float32")
    yield running
    leaving.take(running)


@pytest.fixture
def own_server(tiny_dir: Path, leaving: Leaving) -> Iterator[Server]:
    running = start_server(tiny_dir, "--dtype", "float32")
    yield running
    if running.process.poll() is None:
        leaving.take(running)


def serves(server: Server) -> bool:
    outcome = ask(server.grpc, "ensemble", TWO)
    if outcome.errors or outcome.call_error or not outcome.responses:
        return False
    # A server that starts opens its gRPC port before its HTTP port.
    try:
        with urllib.request.urlopen(f"http://{server.http}/v2/health/ready", timeout=10):
            return True
    except OSError:
        return False


def seeded_text(server: Server) -> str:
    sampling = {"temperature": 0.9, "top_p": 0.95, "seed": 5, "ignore_eos": True}
    return served(server, "generate", "Once upon a time", max_tokens=24, **sampling).text


def test_killed_engine_ends_streams_with_an_error_and_comes_back(lasting: Server) -> None:
    engine, seeded = lasting.processes("naiad.engine_process")[0], seeded_text(lasting)
    streams = [
        Stream(lasting.grpc, model, text_inputs(f"Story {n}", ENDLESS, ignore_eos=True))
        for model in ("ensemble", "text")
        for n in range(4)
    ]
    for stream in streams:
        assert stream.got_response.wait(60)
    engine.send_signal(signal.SIGKILL)
    outcomes = [stream.join(10) for stream in streams]
    for outcome in outcomes:
        assert (len(outcome.errors), outcome.num_finals) == (1, 1)
        assert "engine" in outcome.errors[0]
    refused = ask(lasting.grpc, "ensemble", TWO)
    assert "restart" in refused.errors[0]
    eventually(lambda: serves(lasting), 60)
    assert seeded_text(lasting) == seeded


@pytest.mark.parametrize("model", ["tokenizer", "llm", "detokenizer"])
def test_killed_stub_makes_naiad_serve_restart_the_server(lasting: Server, model: str) -> None:
    server_before = [p for p in lasting.processes("tritonserver") if p.name() == "tritonserver"]
    seeded = seeded_text(lasting)
    stubs = [
        p for p in lasting.processes("triton_python_backend_stub") if f"/{model}/" in " ".join(p.cmdline())
    ]
    engine = lasting.processes("naiad.engine_process")[0]
    assert stubs
    stubs[0].send_signal(signal.SIGKILL)
    eventually(lambda: gone([*server_before, engine]))
    eventually(lambda: serves(lasting), 60)
    assert seeded_text(lasting) == seeded


@pytest.mark.parametrize("victim", ["supervisor", "tritonserver"])
def test_killing_any_parent_leaves_no_engine_process(own_server: Server, victim: str) -> None:
    everything = psutil.Process(own_server.process.pid).children(recursive=True)
    engine = own_server.processes("naiad.engine_process")[0]
    if victim == "supervisor":
        own_server.process.kill()
        own_server.process.wait(10)
    else:
        next(p for p in everything if p.name() == "tritonserver").kill()
    eventually(lambda: gone([engine]))
    if victim == "supervisor":
        eventually(lambda: gone(everything))


def test_sigterm_lets_running_streams_finish(own_server: Server) -> None:
    streams = [
        Stream(own_server.grpc, model, text_inputs(f"Poem {n}", 200, ignore_eos=True))
        for model in ("ensemble", "text")
        for n in range(4)
    ]
    for stream in streams:
        assert stream.got_response.wait(60)
    own_server.process.send_signal(signal.SIGINT)
    outcomes = [stream.join(60) for stream in streams]
    assert own_server.process.wait(60) == 0
    assert all(outcome.num_finals == 1 for outcome in outcomes)


def test_stopping_leaves_no_process_and_nothing_in_shared_memory(lasting: Server) -> None:
    children = psutil.Process(lasting.process.pid).children(recursive=True)
    assert serves(lasting)
    regions = mapped_regions([child.pid for child in children])
    assert regions
    start_s = time.monotonic()
    assert lasting.stop() == 0
    assert time.monotonic() - start_s < 25  # nothing runs, so it does not wait for the exit timeout of 30 s
    eventually(lambda: gone(children), 5)
    assert regions.isdisjoint(os.listdir("/dev/shm"))
