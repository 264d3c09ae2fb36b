"""When a client goes away, its blocks return to the pool, in every state and at every frontend."""

from __future__ import annotations

import http.client
import json
import random
import statistics
import time

import numpy as np
import pytest

from helpers.raw_grpc import ENDLESS, SharedStream, Stream, ask, llm_inputs, text_inputs
from helpers.server import Server, eventually

LONG = [5 + i % 300 for i in range(1900)]


@pytest.fixture(autouse=True)
def idle(tiny: Server) -> None:
    """Wait until no blocks are used, so that those used later are the test's own."""
    free_again(tiny)


def free_again(server: Server) -> float:
    return eventually(lambda: server.used_blocks() == 0, 30)


@pytest.mark.parametrize("model", ["llm", "ensemble", "text"])
def test_cancel_in_decode(tiny: Server, model: str) -> None:
    inputs = llm_inputs([1, 2, 3], ENDLESS) if model == "llm" else text_inputs("Once upon a time", ENDLESS)
    stream = Stream(tiny.grpc, model, inputs | {"ignore_eos": True})
    assert stream.got_response.wait(30)
    eventually(lambda: tiny.used_blocks() > 0)
    num_before = tiny.num_aborted()
    stream.cancel()
    free_again(tiny)
    eventually(lambda: tiny.num_aborted() == num_before + 1)
    assert len(stream.join().responses) < ENDLESS


@pytest.mark.parametrize("model", ["llm", "ensemble", "text"])
def test_cancel_while_queued(tiny: Server, model: str) -> None:
    busy = [Stream(tiny.grpc, "llm", llm_inputs([5], ENDLESS, ignore_eos=True)) for _ in range(32)]
    eventually(lambda: tiny.metric("nv_trt_llm_request_metrics", request_type="scheduled") == 32, 60)
    inputs = llm_inputs([1, 2, 3], 50) if model == "llm" else text_inputs("Once upon a time", 50)
    queued = Stream(tiny.grpc, model, inputs)
    eventually(lambda: tiny.metric("nv_trt_llm_request_metrics", request_type="waiting") == 1)
    queued.cancel()
    eventually(lambda: tiny.metric("nv_trt_llm_request_metrics", request_type="waiting") == 0)
    for stream in busy:
        stream.cancel()
    free_again(tiny)


@pytest.mark.parametrize("model", ["ensemble", "llm", "text"])
def test_http_disconnect(tiny: Server, model: str) -> None:
    body = {"max_tokens": ENDLESS, "text_input": "Once", "stream": True, "ignore_eos": True}
    if model == "llm":
        body = {"input_ids": [5, 6], "input_lengths": 2, "request_output_len": ENDLESS, "streaming": True}
        body["ignore_eos"] = True
    connection = http.client.HTTPConnection(tiny.http, timeout=30)
    connection.request("POST", f"/v2/models/{model}/generate_stream", json.dumps(body))
    connection.getresponse().read(20)
    eventually(lambda: tiny.used_blocks() > 0)
    num_before = tiny.num_aborted()
    connection.close()
    free_again(tiny)
    eventually(lambda: tiny.num_aborted() == num_before + 1)


@pytest.mark.parametrize("asked", ["llm", "text"])
def test_stop_by_request_id_ends_with_cancelled_and_no_error(tiny: Server, asked: str) -> None:
    """It reaches requests of all frontends of the engine."""
    inputs = text_inputs("Once upon a time", ENDLESS, ignore_eos=True, return_finish_reason=True)
    streams = [Stream(tiny.grpc, model, inputs, request_id="stop-me") for model in ("ensemble", "text")]
    other = Stream(tiny.grpc, "ensemble", text_inputs("Two", 40, ignore_eos=True), request_id="not-me")
    for stream in streams:
        assert stream.got_response.wait(30)
    order = llm_inputs([1], 1, stop=True) if asked == "llm" else {"stop": True}
    stop = ask(tiny.grpc, asked, order, request_id="stop-me")
    assert (stop.errors, stop.responses, stop.num_finals) == ([], [], 1)
    for stream in streams:
        outcome = stream.join(20)
        assert (outcome.errors, outcome.num_finals) == ([], 1)
        assert outcome.responses[-1]["finish_reason"].item() == b"cancelled"
    assert other.join().num_finals == 1
    free_again(tiny)


def test_one_of_ten_requests_of_a_stream_is_stopped_and_the_others_end_whole(tiny: Server) -> None:
    inputs = text_inputs("Once upon a time", 200, ignore_eos=True, return_finish_reason=True)
    alone = ask(tiny.grpc, "ensemble", inputs).text
    others = {f"other-{number}": ("ensemble", inputs) for number in range(9)}
    stopped = ("ensemble", inputs | {"max_tokens": ENDLESS})
    stream = SharedStream(tiny.grpc, others | {"stop-one-of-ten": stopped})
    eventually(lambda: all(outcome.responses for outcome in stream.outcomes.values()))
    stop = ask(tiny.grpc, "llm", llm_inputs([1], 1, stop=True), request_id="stop-one-of-ten")
    assert (stop.errors, stop.num_finals) == ([], 1)
    eventually(lambda: all(outcome.num_finals for outcome in stream.outcomes.values()))
    outcomes = stream.join()
    assert stream.call_error == ""
    assert {(len(outcome.errors), outcome.num_finals) for outcome in outcomes.values()} == {(0, 1)}
    cancelled = outcomes.pop("stop-one-of-ten")
    assert cancelled.responses[-1]["finish_reason"].item() == b"cancelled"
    reasons = {outcome.responses[-1]["finish_reason"].item() for outcome in outcomes.values()}
    assert (len(outcomes), reasons) == (9, {b"length"})
    assert {outcome.text for outcome in outcomes.values()} == {alone}
    free_again(tiny)


def test_a_deadline_of_the_client_takes_its_request_out_of_the_queue(tiny: Server) -> None:
    busy = [Stream(tiny.grpc, "llm", llm_inputs([5], ENDLESS, ignore_eos=True)) for _ in range(32)]
    eventually(lambda: tiny.metric("nv_trt_llm_request_metrics", request_type="scheduled") == 32, 60)
    inputs = {"llm": llm_inputs([1, 2, 3], 50)} | dict.fromkeys(("ensemble", "text"), text_inputs("Once", 50))
    queued = [Stream(tiny.grpc, model, its, deadline_s=5) for model, its in inputs.items()]
    eventually(lambda: tiny.metric("nv_trt_llm_request_metrics", request_type="waiting") == len(queued))
    outcomes = [stream.join() for stream in queued]
    assert {outcome.call_error for outcome in outcomes} == {"StatusCode.DEADLINE_EXCEEDED"}
    assert [outcome.responses for outcome in outcomes] == [[], [], []]
    eventually(lambda: tiny.metric("nv_trt_llm_request_metrics", request_type="waiting") == 0)
    assert tiny.metric("nv_trt_llm_request_metrics", request_type="active") == 32
    assert not any(stream.has_ended for stream in busy)
    for stream in busy:
        stream.cancel()
    free_again(tiny)


def test_a_hundred_cancels_in_a_row(tiny: Server) -> None:
    """The printed wait includes the running step and the gauge's period of 50 ms."""
    draw = random.Random(7)
    waits_s = []
    num_before = tiny.num_aborted()
    for number in range(100):
        model = ("llm", "ensemble")[number % 2]
        prompt = LONG[: draw.randrange(1, 90)]
        inputs = llm_inputs(prompt, ENDLESS) if model == "llm" else text_inputs("Tell me", ENDLESS)
        stream = Stream(tiny.grpc, model, inputs | {"ignore_eos": True})
        eventually(lambda: tiny.used_blocks() > 0)
        # At a random moment of a step.
        time.sleep(draw.uniform(0, 0.02))
        stream.cancel()
        waits_s.append(free_again(tiny))
        stream.join()
    median_ms, max_ms = (round(1e3 * each(waits_s)) for each in (statistics.median, max))
    print(f"blocks free after a cancel: median {median_ms} ms, max {max_ms} ms")
    assert tiny.used_blocks() == 0
    eventually(lambda: tiny.num_aborted() == num_before + 100)


def test_acknowledging_guessed_sequences_cancels_nobody(tiny: Server) -> None:
    inputs = text_inputs("Once upon a time", ENDLESS, ignore_eos=True, return_finish_reason=True)
    victim = Stream(tiny.grpc, "ensemble", inputs, request_id="victim")
    assert victim.got_response.wait(30)
    for sequence_id in range(64):
        guess = Stream(
            tiny.grpc,
            "detokenizer",
            {
                "TOKENS_BATCH": np.array([[[104]]], dtype=np.int32),
                "SEQUENCE_LENGTH": [1],
                "sequence_id": np.array([[sequence_id]], dtype=np.uint64),
                "window_ids": [104],
                "num_emitted_tokens": [0],
                "max_chars": [-1],
                "is_last": [False],
            },
        )
        guess.cancel()
    assert not victim.has_ended
    ask(tiny.grpc, "llm", llm_inputs([1], 1, stop=True), request_id="victim")
    outcome = victim.join()
    assert (outcome.errors, outcome.num_finals) == ([], 1)
    assert outcome.responses[-1]["finish_reason"].item() == b"cancelled"
    undisturbed = ask(tiny.grpc, "ensemble", text_inputs("Once upon a time", 100, ignore_eos=True)).text
    # Both texts may end inside a character.
    shorter, longer = sorted((outcome.text.rstrip("\ufffd"), undisturbed.rstrip("\ufffd")), key=len)
    assert shorter
    assert longer.startswith(shorter)
    free_again(tiny)


def test_cancel_in_a_crowd_of_silent_clients(tiny: Server) -> None:
    """Half of the clients hold blocks, the others wait; none gets a token before its request ends."""
    inputs = text_inputs("Once upon a time", ENDLESS, stream=False, ignore_eos=True)
    crowd = [Stream(tiny.grpc, "ensemble", inputs) for _ in range(64)]
    eventually(lambda: tiny.metric("nv_trt_llm_request_metrics", request_type="active") == 64, 30)
    for stream in crowd:
        stream.cancel()
    free_again(tiny)
    eventually(lambda: tiny.metric("nv_trt_llm_request_metrics", request_type="active") == 0)
