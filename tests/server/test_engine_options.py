"""Engine options take effect: one slot, the shortest prompt first, no prefix cache, a limit in tokens."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from helpers.raw_grpc import ENDLESS, Stream, llm_inputs
from helpers.served import WAYS, ask_by, served
from helpers.server import Leaving, Server, eventually, start_server

MAX_QUEUED_TOKENS = 600
# With this aging each prompt token counts as 20 ms of waiting; with the default it would be 100 ms.
AGING_MS = 2000


@pytest.fixture(scope="module")
def shortest(tiny_dir: Path, leaving: Leaving) -> Iterator[Server]:
    running = start_server(
        tiny_dir,
        *("--dtype", "float32", "--max-num-seqs", "1"),
        *("--scheduling-policy", "shortest_prompt", "--priority-aging-ms", str(AGING_MS)),
        *("--max-queued-tokens", str(MAX_QUEUED_TOKENS), "--enable-prefix-caching", "false"),
    )
    yield running
    leaving.take(running)


class Queue:
    """Requests that wait for the only slot, which another request holds until `open`."""

    def __init__(self, server: Server, pool: ThreadPoolExecutor) -> None:
        self._started_ns: dict[int, int] = {}
        self._server, self._pool = server, pool
        self._asked: list[Future[None]] = []
        self._busy = Stream(server.grpc, "llm", llm_inputs([5], ENDLESS, ignore_eos=True))
        assert self._busy.got_response.wait(60)

    def add(self, way: str, num_prompt_tokens: int, **fields: int) -> None:
        self._asked.append(self._pool.submit(self._ask, way, num_prompt_tokens, **fields))
        eventually(lambda: self.num_waiting() == len(self._asked))

    def num_waiting(self) -> float:
        return self._server.metric("nv_trt_llm_request_metrics", request_type="waiting")

    def open(self) -> list[int]:
        """Free the slot; return the lengths of the prompts in the order in which they got it."""
        self._busy.cancel()
        for each in self._asked:
            each.result()
        return sorted(self._started_ns, key=lambda length: self._started_ns[length])

    def _ask(self, way: str, num_prompt_tokens: int, **fields: int) -> None:
        requested = {"max_tokens": 3, "ignore_eos": True, "return_perf_metrics": True}
        answer = served(self._server, way, [7] * num_prompt_tokens, **requested, **fields)
        self._started_ns[num_prompt_tokens] = answer.end("first_scheduled_time_ns")


@pytest.fixture
def queue(shortest: Server) -> Iterator[Queue]:
    with ThreadPoolExecutor(4) as pool:
        waiting = Queue(shortest, pool)
        yield waiting
        waiting.open()


@pytest.mark.parametrize("way", WAYS)
def test_the_shortest_prompt_goes_first_whatever_its_priority(queue: Queue, way: str) -> None:
    queue.add(way, 500)
    queue.add(way, 3, priority=100)
    assert queue.open() == [3, 500]


@pytest.mark.parametrize("way", WAYS)
def test_a_request_that_has_waited_past_the_aging_time_goes_first(queue: Queue, way: str) -> None:
    queue.add(way, 25)
    time.sleep(1)
    queue.add(way, 5)
    assert queue.open() == [25, 5]


@pytest.mark.parametrize("way", WAYS)
def test_prompt_tokens_that_wait_are_bounded(shortest: Server, queue: Queue, way: str) -> None:
    queue.add(way, MAX_QUEUED_TOKENS - 100)
    error = ask_by(shortest, way, [7] * 101).error
    assert f"500 prompt tokens wait and 101 more would come, at most {MAX_QUEUED_TOKENS} may" in error
    queue.add(way, 100)
    assert sorted(queue.open()) == [100, 500]


@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_taken_from_the_prefix_cache(shortest: Server, way: str) -> None:
    prompt = "The library opens at nine and closes at five. " * 16
    counts = [
        served(shortest, way, prompt, max_tokens=2, return_num_cached_tokens=True).end("num_cached_tokens")
        for _ in range(2)
    ]
    assert counts == [0, 0]
    assert shortest.settled("vllm:prefix_cache_hits_total") == 0
