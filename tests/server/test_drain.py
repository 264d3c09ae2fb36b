"""SIGTERM under load: new requests are refused, unfinished ones get an error, and nothing is left behind."""

from __future__ import annotations

import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from helpers.raw_grpc import ENDLESS, Outcome, Stream, ask, text_inputs
from helpers.server import Server, eventually, gone, start_server
from naiad.cli.serve.shared_memory import mapped_regions

# Long beside the time that a refusal takes while eight streams load every core.
EXIT_TIMEOUT_S = 5
STREAMING = (True, False)
MODELS = ("ensemble", "text")


def story(number: int, is_streaming: bool) -> dict[str, Any]:
    return text_inputs(f"Story {number}", ENDLESS, ignore_eos=True) | {"stream": is_streaming}


def refused(server: Server) -> Outcome:
    """Send requests until one is refused; those that arrive before the engine is notified are served."""
    while True:
        outcome = ask(server.grpc, "ensemble", text_inputs("Hello", 1))
        if outcome.errors:
            return outcome


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_under_load(tiny_dir: Path, number: signal.Signals) -> None:
    server = start_server(tiny_dir, "--dtype", "float32", "--exit-timeout-s", str(EXIT_TIMEOUT_S))
    children = psutil.Process(server.process.pid).children(recursive=True)
    regions = mapped_regions([child.pid for child in children])
    assert regions
    streams = [Stream(server.grpc, MODELS[i // 4], story(i, STREAMING[i % 2])) for i in range(8)]
    assert all(stream.got_response.wait(60) for stream in streams[::2])
    eventually(lambda: server.metric("nv_trt_llm_request_metrics", request_type="active") == 8)

    start_s = time.monotonic()
    server.process.send_signal(number)
    late = refused(server)
    refused_s = time.monotonic() - start_s
    is_early = not any(stream.has_ended for stream in streams)
    outcomes = [stream.join(30) for stream in streams]
    answered_s = time.monotonic() - start_s
    code = server.process.wait(30)
    stopped_s = time.monotonic() - start_s
    print(f"refused {refused_s:.2f} s, answered {answered_s:.2f} s, stopped {stopped_s:.2f} s")

    assert code == 0, "\n".join(server.lines[-20:])
    assert (late.num_finals, late.responses) == (1, [])
    assert "the server is shutting down" in late.errors[0]
    assert is_early
    for outcome in outcomes:
        assert (outcome.num_finals, len(outcome.errors), outcome.call_error) == (1, 1, "")
        # The signal has taken some of the time.
        assert re.search(r"did not finish in (5|4\.\d+) s before the server stopped", outcome.errors[0])
    assert answered_s > EXIT_TIMEOUT_S
    eventually(lambda: gone(children))
    assert regions.isdisjoint(os.listdir("/dev/shm"))


def test_stop_while_requests_keep_coming(tiny_dir: Path) -> None:
    server = start_server(tiny_dir, "--dtype", "float32", "--exit-timeout-s", "2")
    outcomes: list[tuple[float, Outcome]] = []

    def keep_asking() -> None:
        while server.process.poll() is None:
            start_s = time.monotonic()
            outcome = ask(server.grpc, "ensemble", text_inputs("Hello", 4, ignore_eos=True))
            outcomes.append((time.monotonic() - start_s, outcome))
            if outcome.call_error:
                time.sleep(0.1)

    with ThreadPoolExecutor(4) as pool:
        askers = [pool.submit(keep_asking) for _ in range(4)]
        stream = Stream(server.grpc, "ensemble", story(0, is_streaming=True))
        assert stream.got_response.wait(60)
        start_s = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        code = server.process.wait(30)
        stopped_s = time.monotonic() - start_s
        for asker in askers:
            asker.result()
    print(f"stopped {stopped_s:.2f} s, longest answer {max(seconds for seconds, _ in outcomes):.2f} s")
    assert code == 0, "\n".join(server.lines[-20:])
    assert "did not finish in 2 s" in stream.join(5).errors[0]
    assert any("shutting down" in outcome.errors[0] for _, outcome in outcomes if outcome.errors)
    # Once the models are unloaded, the server itself refuses requests, without a FINAL.
    unfinished = [outcome for _, outcome in outcomes if outcome.num_finals != 1]
    assert all(outcome.call_error or "unknown model" in outcome.errors[0] for outcome in unfinished)
