"""Killed processes, the stop and models that come and go, seen through the OpenAI API."""

from __future__ import annotations

import http.client
import json
import signal
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from helpers.openai_api import COMPLETIONS, connect, post, refused, whole
from helpers.raw_grpc import ask, text_inputs
from helpers.server import Leaving, Server, eventually, gone, start_server, without_engine

MODEL = "checkpoint"  # the name of the directory, as no other name is given
GREEDY = {"model": MODEL, "prompt": "Once upon a time", "temperature": 0, "ignore_eos": True}
ENDLESS = {**GREEDY, "max_tokens": 30_000, "stream": True}
CROWD = 64
TWO = text_inputs("Hello", 2, ignore_eos=True)


@pytest.fixture(scope="module")
def lasting(tiny_dir: Path, leaving: Leaving) -> Iterator[Server]:
    """A server that serves again after each test; the last test stops it."""
    running = start_server(tiny_dir, "--dtype", "float32", "--openai-port", "0")
    yield running
    leaving.take(running)


def begin_stream(server: Server) -> http.client.HTTPResponse:
    """Begin an endless stream; return the response after its first event."""
    connection = connect(server)
    connection.request("POST", COMPLETIONS, json.dumps(ENDLESS), {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert response.status == 200
    assert response.readline().startswith(b"data: ")
    return response


def text(server: Server) -> str:
    return whole(server, COMPLETIONS, **GREEDY, max_tokens=16).texts[0]


def serves(server: Server) -> bool:
    try:
        return post(server, COMPLETIONS, {**GREEDY, "max_tokens": 1})[0] == 200
    except OSError:
        return False


def test_a_killed_engine_ends_streams_with_an_error_event(lasting: Server) -> None:
    expected, stream = text(lasting), begin_stream(lasting)
    with without_engine(lasting):
        rest = stream.read().decode().strip().split("\n\n")
        error = json.loads(rest[-1].removeprefix("data: "))["error"]
        assert "the engine process ended" in error["message"]
        assert "[DONE]" not in "".join(rest)
        status, error = refused(lasting, COMPLETIONS, {**GREEDY, "max_tokens": 1})
        assert (status, error["type"]) == (503, "service_unavailable_error")
    eventually(lambda: serves(lasting), 60)
    assert text(lasting) == expected


def answer_in_the_end(server: Server, tokens: int) -> tuple[str, list[int]]:
    """Ask until there is an answer, as clients do; return its text, and how long refusals asked to wait."""
    body = {**GREEDY, "max_tokens": tokens}
    pauses = []
    while True:
        try:
            status, headers, raw = post(server, COMPLETIONS, body)
        except OSError:
            status, headers, raw = 503, {"retry-after": "1"}, "no connection"
        if status == 200:
            return json.loads(raw)["choices"][0]["text"], pauses
        # 500: it was running when the engine ended.
        assert status in (500, 503), raw
        pauses.append(int(headers.get("retry-after", "1")))
        time.sleep(pauses[-1])


def test_a_crowd_comes_back_to_a_new_engine(lasting: Server) -> None:
    lengths = [2 + number % 30 for number in range(CROWD)]
    (longest,) = whole(lasting, COMPLETIONS, **GREEDY, max_tokens=max(lengths)).texts
    with ThreadPoolExecutor(CROWD) as pool:
        ends = [pool.submit(answer_in_the_end, lasting, tokens) for tokens in lengths]
        with without_engine(lasting):
            eventually(lambda: refused(lasting, COMPLETIONS, {**GREEDY, "max_tokens": 1})[0] == 503)
        answers = [end.result() for end in ends]
    assert all(longest.startswith(text) for text, _ in answers)
    assert len({text for text, _ in answers}) > 1
    pauses = Counter(pause for _, all_pauses in answers for pause in all_pauses)
    assert len(pauses) > 1, "clients that were refused together all came back together"
    eventually(lambda: lasting.used_blocks() == 0)


def test_a_killed_openai_server_harms_nobody_and_comes_back(lasting: Server) -> None:
    expected, stream = text(lasting), begin_stream(lasting)
    eventually(lambda: lasting.metric("vllm:num_requests_running") == 1)
    killed = lasting.processes("naiad.openai_server")
    killed[0].send_signal(signal.SIGKILL)
    with pytest.raises((http.client.IncompleteRead, ConnectionError)):
        stream.read()
    assert ask(lasting.grpc, "ensemble", TWO).errors == []
    eventually(lambda: lasting.metric("vllm:num_requests_running") == 0)
    eventually(lambda: lasting.used_blocks() == 0)
    eventually(lambda: serves(lasting), 60)
    assert text(lasting) == expected
    assert gone(killed)


def test_it_survives_a_restart_of_the_triton_server(lasting: Server) -> None:
    expected = text(lasting)
    (before,) = lasting.processes("naiad.openai_server")
    stub = next(
        each for each in lasting.processes("triton_python_backend_stub") if "/llm/" in str(each.cmdline())
    )
    stub.send_signal(signal.SIGKILL)
    eventually(lambda: not serves(lasting), 60)
    status, _ = refused(lasting, COMPLETIONS, {**GREEDY, "max_tokens": 1})
    assert status == 503
    # The engine answers before the whole server is ready.
    eventually(lambda: any(line.endswith("the server serves again") for line in lasting.lines), 60)
    assert text(lasting) == expected
    assert lasting.processes("naiad.openai_server") == [before]


def test_the_stop_lets_streams_finish(lasting: Server) -> None:
    connection = connect(lasting)
    body = json.dumps({**ENDLESS, "max_tokens": 300})
    connection.request("POST", COMPLETIONS, body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert response.readline().startswith(b"data: ")
    children = lasting.processes("naiad.openai_server")
    lasting.process.send_signal(signal.SIGTERM)
    assert response.read().decode().endswith("data: [DONE]\n\n")
    assert lasting.process.wait(60) == 0
    eventually(lambda: gone(children), 5)
