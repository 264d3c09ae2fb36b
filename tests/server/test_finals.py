"""Each of many mixed requests gets exactly one FINAL, and the server can still unload models and stop."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from helpers.raw_grpc import ENDLESS, Outcome, Stream, ask, llm_inputs, text_inputs
from helpers.server import Server, eventually, start_server

NUM_FAILING = 16
KINDS = ("good", "unstreamed", "refused", "cancelled early", "cancelled late", "stopped", "timed out", "rows")


def make(kind: str, number: int, draw: random.Random) -> tuple[str, dict[str, Any], dict[str, Any]]:
    model = draw.choice(("llm", "ensemble", "text"))
    length = draw.randrange(1, 12)
    inputs = (
        llm_inputs([5, 6, number % 300], length)
        if model == "llm"
        else text_inputs(f"Number {number}", length)
    )
    stream_name = "streaming" if model == "llm" else "stream"
    options: dict[str, Any] = {"request_id": f"id-{number}"}
    if kind == "unstreamed":
        inputs[stream_name] = False
    elif kind == "refused":
        inputs["temperature"] = -1.0
    elif kind in ("cancelled late", "stopped"):
        inputs |= {("request_output_len" if model == "llm" else "max_tokens"): ENDLESS, "ignore_eos": True}
    elif kind == "timed out":
        inputs |= {("request_output_len" if model == "llm" else "max_tokens"): ENDLESS, "ignore_eos": True}
        options["timeout"] = 300_000
    return model, inputs, options


def run(server: Server, number: int) -> tuple[str, Outcome]:
    draw = random.Random(number)
    kind = KINDS[number % len(KINDS)]
    model, inputs, options = make(kind, number, draw)
    if kind == "rows":
        import numpy as np

        inputs = {key: np.repeat(_array(value), 3, axis=0) for key, value in inputs.items()}
    stream = Stream(server.grpc, model, inputs, **options)
    if kind == "cancelled early":
        time.sleep(draw.uniform(0, 0.05))
        stream.cancel()
    elif kind == "cancelled late":
        stream.got_response.wait(60)
        stream.cancel()
    elif kind == "stopped":
        stream.got_response.wait(60)
        ask(server.grpc, "llm", llm_inputs([1], 1, stop=True), request_id=options["request_id"])
    return kind, stream.join(120)


def _array(value: Any) -> Any:
    from helpers.raw_grpc import as_tensor

    return as_tensor(value)


def lose_engine(server: Server) -> list[tuple[str, Outcome]]:
    """Kill the engine while some requests are streaming and others have no response yet."""
    prompt = [5 + index % 300 for index in range(1900)]
    after = [
        Stream(server.grpc, "llm", llm_inputs([7, number], ENDLESS, ignore_eos=True))
        for number in range(NUM_FAILING // 2)
    ]
    assert all(stream.got_response.wait(60) for stream in after)
    inputs = llm_inputs(prompt, ENDLESS, ignore_eos=True) | {"streaming": False}
    before = [Stream(server.grpc, "llm", inputs) for _ in range(NUM_FAILING // 2)]
    eventually(lambda: server.metric("nv_trt_llm_request_metrics", request_type="active") == NUM_FAILING)
    server.processes("naiad.engine_process")[0].kill()
    outcomes = [("failed after the first response", stream.join(30)) for stream in after]
    outcomes += [("failed before the first response", stream.join(30)) for stream in before]
    eventually(lambda: not ask(server.grpc, "llm", llm_inputs([1], 1)).errors, 60)
    return outcomes


@pytest.mark.parametrize("num_requests", [100, pytest.param(500, marks=pytest.mark.slow)])
def test_mixed_requests_get_one_final_each(tiny_dir: Path, num_requests: int) -> None:
    server = start_server(tiny_dir, "--dtype", "float32")
    try:
        with ThreadPoolExecutor(24) as pool:
            results = list(pool.map(lambda number: run(server, number), range(num_requests - NUM_FAILING)))
        results += lose_engine(server)
        bad = [
            (kind, outcome)
            for kind, outcome in results
            if not kind.startswith("cancelled") and (outcome.num_finals != 1 or outcome.call_error)
        ]
        assert bad == []
        erring = [outcome for kind, outcome in results if kind.split()[0] in ("refused", "failed")]
        assert all(len(outcome.errors) == 1 for outcome in erring)
        assert all(
            bool(outcome.responses) == ("after" in kind) for kind, outcome in results if "failed" in kind
        )
        # A client that went away reads nothing more; the metrics show that its request has ended.
        eventually(lambda: server.metric("nv_trt_llm_request_metrics", request_type="active") == 0)
        eventually(lambda: server.used_blocks() == 0)
        print(Counter(kind for kind, _ in results))
    finally:
        start_s = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        code = server.process.wait(60)
    assert code == 0
    assert time.monotonic() - start_s < 25  # a hung request holds the server for its whole exit timeout, 30 s
