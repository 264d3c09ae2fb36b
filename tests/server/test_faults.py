"""Killed processes: clients get an error, the service recovers by itself, and nothing is left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from helpers.raw_grpc import ENDLESS, Outcome, Stream, ask, text_inputs
from helpers.served import served
from helpers.server import Leaving, Server, eventually, gone, start_server
from naiad.cli.serve.shared_memory import mapped_regions

TWO = text_inputs("Hello", 4, ignore_eos=True)
STOPPED_S = 5


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


def stub_of(server: Server, model: str) -> psutil.Process:
    """The model's Python process."""
    stubs = server.processes("triton_python_backend_stub")
    return next(each for each in stubs if f"/{model}/" in " ".join(each.cmdline()))


def stop_for_a_while(process: psutil.Process) -> None:
    """Have the process stand still, as on a machine that swaps it out, unless it is killed meanwhile."""
    goes_on_s = time.monotonic() + STOPPED_S
    process.send_signal(signal.SIGSTOP)
    eventually(lambda: gone([process]) or time.monotonic() > goes_on_s, 2 * STOPPED_S)
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(signal.SIGCONT)


def has_one_end(outcome: Outcome, whole: str) -> bool:
    """Whether a request got all of this text, or its beginning and an error with FINAL or a lost call."""
    ends = len(outcome.errors), outcome.num_finals, outcome.call_error
    if ends == (0, 1, ""):
        return outcome.text == whole
    # The text may end inside a character.
    is_beginning = whole.startswith(outcome.text.rstrip("\ufffd"))
    return is_beginning and ends in ((1, 1, ""), (0, 0, "StatusCode.UNAVAILABLE"))


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
    engine = lasting.processes("naiad.engine_process")[0]
    stub_of(lasting, model).send_signal(signal.SIGKILL)
    eventually(lambda: gone([*server_before, engine]))
    eventually(lambda: serves(lasting), 60)
    assert seeded_text(lasting) == seeded


@pytest.mark.parametrize("model", ["llm", "detokenizer"])
def test_a_stub_that_stands_still_under_load_ends_streams_once_and_the_server_serves_again(
    lasting: Server, model: str
) -> None:
    seeded = seeded_text(lasting)
    inputs = text_inputs("Once upon a time", 600, ignore_eos=True)
    whole = ask(lasting.grpc, "ensemble", inputs).text
    streams = [Stream(lasting.grpc, door, inputs) for door in ("ensemble", "text") for _ in range(4)]
    for stream in streams:
        assert stream.got_response.wait(60)
    assert not any(stream.has_ended for stream in streams)
    stop_for_a_while(stub_of(lasting, model))
    outcomes = [stream.join() for stream in streams]
    assert all(has_one_end(outcome, whole) for outcome in outcomes), [
        (len(outcome.text), outcome.errors, outcome.call_error, outcome.num_finals) for outcome in outcomes
    ]
    eventually(lambda: serves(lasting), 90)
    eventually(lambda: lasting.used_blocks() == 0)
    assert seeded_text(lasting) == seeded


@pytest.mark.parametrize("victim", ["supervisor", "tritonserver", "server_guard"])
def test_killing_any_parent_leaves_no_engine_process(own_server: Server, victim: str) -> None:
    everything = psutil.Process(own_server.process.pid).children(recursive=True)
    engine = own_server.processes("naiad.engine_process")[0]
    regions = mapped_regions([each.pid for each in everything])
    assert regions
    if victim == "supervisor":
        own_server.process.kill()
        own_server.process.wait(10)
    elif victim == "tritonserver":
        next(p for p in everything if p.name() == "tritonserver").kill()
    else:
        (guard,) = own_server.processes("naiad.cli.serve.server_guard")
        guard.kill()
    eventually(lambda: gone([engine]))
    if victim == "supervisor":
        eventually(lambda: gone(everything))
    else:
        eventually(lambda: serves(own_server), 90)
    eventually(lambda: regions.isdisjoint(os.listdir("/dev/shm")))


def test_the_next_server_removes_the_regions_of_one_that_was_killed_with_its_guard(
    own_server: Server, tiny_dir: Path, leaving: Leaving
) -> None:
    everything = psutil.Process(own_server.process.pid).children(recursive=True)
    regions = mapped_regions([each.pid for each in everything])
    (guard,) = own_server.processes("naiad.cli.serve.server_guard")
    # So that it does not see the other end.
    guard.send_signal(signal.SIGSTOP)
    own_server.process.kill()
    own_server.process.wait(10)
    guard.kill()
    eventually(lambda: gone(everything))
    assert regions & set(os.listdir("/dev/shm"))
    following = start_server(tiny_dir, "--dtype", "float32")
    try:
        assert regions.isdisjoint(os.listdir("/dev/shm"))
    finally:
        leaving.take(following)


def test_the_engine_is_the_first_to_be_killed_when_memory_runs_out(lasting: Server) -> None:
    def adjustments(word: str) -> set[int]:
        paths = [Path(f"/proc/{each.pid}/oom_score_adj") for each in lasting.processes(word)]
        return {int(path.read_text(encoding="ascii")) for path in paths}

    own = int(Path("/proc/self/oom_score_adj").read_text(encoding="ascii"))
    assert adjustments("naiad.engine_process") == {500}
    assert adjustments("triton_python_backend_stub") == adjustments("tritonserver") == {own}


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
