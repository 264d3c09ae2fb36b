"""Queue limits, priorities, deadlines and tenants on a server with two slots."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from helpers.openai_api import COMPLETIONS, post
from helpers.raw_grpc import ENDLESS, Stream, ask, llm_inputs, text_inputs
from helpers.served import WAYS, ask_by, served
from helpers.server import Leaving, Server, eventually, start_server

SLOTS, QUEUE = 2, 3


@pytest.fixture(scope="module")
def narrow(tiny_dir: Path, leaving: Leaving) -> Iterator[Server]:
    options = ("--max-num-seqs", str(SLOTS), "--max-queued-requests", str(QUEUE), "--openai-port", "0")
    running = start_server(tiny_dir, "--dtype", "float32", *options)
    yield running
    leaving.take(running)


def gauge(server: Server, request_type: str) -> float:
    return server.metric("nv_trt_llm_request_metrics", request_type=request_type)


def fill_slots(server: Server, model: str = "ensemble", **more: Any) -> list[Stream]:
    streams = [ask_long(server, model, **more) for _ in range(SLOTS)]
    for stream in streams:
        assert stream.got_response.wait(60)
    return streams


def ask_long(server: Server, model: str = "ensemble", num_tokens: int = ENDLESS, **more: Any) -> Stream:
    inputs = (
        llm_inputs([104, 375, 282], num_tokens, ignore_eos=True, **more)
        if model == "llm"
        else text_inputs("Once upon a time", num_tokens, ignore_eos=True, **more)
    )
    return Stream(server.grpc, model, inputs)


def end(server: Server, streams: list[Stream]) -> None:
    for stream in streams:
        stream.cancel()
    eventually(lambda: gauge(server, "active") == 0)
    for stream in streams:
        stream.join()


@pytest.mark.parametrize("model", ["llm", "ensemble"])
def test_exactly_the_requests_that_run_or_may_wait_are_served(narrow: Server, model: str) -> None:
    streams = [ask_long(narrow, model) for _ in range(12)]
    eventually(lambda: sum(stream.has_ended for stream in streams) == 12 - SLOTS - QUEUE)
    left = [stream for stream in streams if not stream.has_ended]
    refused = [stream.join() for stream in streams if stream not in left]
    assert {outcome.num_finals for outcome in refused} == {1}
    assert all("the queue is full: 5 sequences run or wait" in outcome.errors[0] for outcome in refused)
    eventually(lambda: gauge(narrow, "active") == SLOTS + QUEUE)
    # Each of the others gets its turn.
    while left:
        eventually(lambda: any(stream.got_response.is_set() for stream in left), 60)
        stream = next(stream for stream in left if stream.got_response.is_set())
        assert not stream.has_ended
        left.remove(stream)
        stream.cancel()
        assert stream.join().errors == []
    eventually(lambda: gauge(narrow, "active") == 0)


def test_deep_health_calls_a_model_with_a_full_queue_busy(narrow: Server) -> None:
    streams = fill_slots(narrow) + [ask_long(narrow) for _ in range(QUEUE)]
    eventually(lambda: gauge(narrow, "active") == SLOTS + QUEUE)
    status, _, raw = post(narrow, "/health/deep", b"", "GET")
    (health,) = json.loads(raw)["models"].values()
    assert (status, health["status"]) == (200, "busy")
    assert "the queue is full" in health["error"]
    end(narrow, streams)


@pytest.mark.parametrize("way", WAYS)
def test_a_full_queue_refuses_until_there_is_room(narrow: Server, way: str) -> None:
    streams = [*fill_slots(narrow), *[ask_long(narrow) for _ in range(QUEUE)]]
    eventually(lambda: gauge(narrow, "waiting") == QUEUE)
    assert "the queue is full" in ask_by(narrow, way, "Hello").error
    end(narrow, streams)
    served(narrow, way, "Hello")


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_says_to_openai_clients_when_to_come_back(narrow: Server, stream: bool) -> None:
    streams = [*fill_slots(narrow), *[ask_long(narrow) for _ in range(QUEUE)]]
    eventually(lambda: gauge(narrow, "waiting") == QUEUE)
    body = {"model": "checkpoint", "prompt": "Hello", "max_tokens": 1, "stream": stream}
    status, headers, raw = post(narrow, COMPLETIONS, body)
    assert (status, headers["retry-after"] in ("1", "2", "3")) == (503, True), raw
    assert "the queue is full" in json.loads(raw)["error"]["message"]
    end(narrow, streams)


@pytest.mark.parametrize("way", WAYS)
def test_a_smaller_priority_takes_a_slot_and_no_token_is_lost(narrow: Server, way: str) -> None:
    num_before = narrow.settled("vllm:num_preemptions_total")
    slow = fill_slots(narrow, priority=5)
    served(narrow, way, "Hello", max_tokens=4, priority=0, ignore_eos=True)
    assert not any(stream.has_ended for stream in slow)
    eventually(lambda: narrow.metric("vllm:num_preemptions_total") > num_before)
    num_chars = max(len(stream.outcome.text) for stream in slow) + 40
    eventually(lambda: all(len(stream.outcome.text) > num_chars for stream in slow), 60)
    end(narrow, slow)
    # Both have the same prompt, and only one lost its slot.
    texts = sorted((stream.outcome.text for stream in slow), key=len)
    assert texts[1].startswith(texts[0])


@pytest.mark.parametrize("way", WAYS)
def test_the_smaller_priority_leaves_the_queue_first(narrow: Server, way: str) -> None:
    streams = fill_slots(narrow)
    started_ns: dict[int, int] = {}

    def wait_in_queue(priority: int) -> None:
        requested = {"max_tokens": 8, "ignore_eos": True, "return_perf_metrics": True}
        answer = served(narrow, way, "Hello", priority=priority, **requested)
        started_ns[priority] = answer.end("first_scheduled_time_ns")

    with ThreadPoolExecutor(QUEUE) as pool:
        asked = []
        for num_waiting, priority in enumerate((3, 1, 2), 1):
            asked.append(pool.submit(wait_in_queue, priority))
            eventually(lambda num=num_waiting: gauge(narrow, "waiting") == num)
        streams[0].cancel()
        for each in asked:
            each.result()
    assert sorted(started_ns, key=lambda priority: started_ns[priority]) == [1, 2, 3]
    end(narrow, streams)


def test_equal_priorities_wait_their_turn(narrow: Server) -> None:
    streams = fill_slots(narrow)
    later = ask_long(narrow, num_tokens=2)
    eventually(lambda: gauge(narrow, "waiting") == 1)
    assert not later.got_response.is_set()
    end(narrow, streams)
    assert later.join().num_finals == 1


@pytest.mark.parametrize("way", WAYS)
def test_another_tenant_takes_a_slot_from_a_flood(narrow: Server, way: str) -> None:
    streams = fill_slots(narrow, cache_salt="flood")
    streams += [ask_long(narrow, cache_salt="flood") for _ in range(QUEUE - 1)]
    eventually(lambda: gauge(narrow, "waiting") == QUEUE - 1)
    served(narrow, way, "Hello", max_tokens=4, cache_salt="other", ignore_eos=True)
    assert not any(stream.has_ended for stream in streams)
    assert not any(stream.got_response.is_set() for stream in streams[SLOTS:])
    end(narrow, streams)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("prompt", ["Hello", [5, 6]], ids=["ensemble", "llm"])
def test_a_deadline_in_the_queue_is_unavailable_and_never_started(
    narrow: Server, prompt: str | list[int], way: str
) -> None:
    streams = fill_slots(narrow)
    answer = ask_by(narrow, way, prompt, timeout=300_000)
    assert answer.pieces == []
    assert "timeout: the request was not started within its time limit" in answer.error
    end(narrow, streams)


@pytest.mark.parametrize("way", WAYS)
def test_a_deadline_ends_a_running_request_with_what_it_has(narrow: Server, way: str) -> None:
    requested = {"return_finish_reason": True, "return_num_output_tokens": True}
    answer = served(narrow, way, "Once", timeout=1_000_000, max_tokens=ENDLESS, ignore_eos=True, **requested)
    assert answer.end("finish_reason") == "timeout"
    assert 0 < sum(answer.all("num_output_tokens")) < ENDLESS
    assert answer.text
    eventually(lambda: narrow.used_blocks() == 0)


def test_hits_of_the_prefix_cache_are_counted(narrow: Server) -> None:
    prompt = "The library opens at nine and closes at five. " * 16
    queries, hits = (narrow.settled(f"vllm:prefix_cache_{name}_total") for name in ("queries", "hits"))
    for _ in range(2):
        outcome = ask(narrow.grpc, "ensemble", text_inputs(prompt, 2, return_num_cached_tokens=True))
    num_cached = max(int(response["num_cached_tokens"].item()) for response in outcome.responses)
    assert num_cached >= 128
    eventually(lambda: narrow.metric("vllm:prefix_cache_hits_total") == hits + num_cached)
    eventually(lambda: narrow.metric("vllm:prefix_cache_queries_total") > queries)
