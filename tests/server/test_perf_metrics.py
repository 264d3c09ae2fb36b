"""`return_perf_metrics`: timings, blocks and drafts of a request, by each protocol and from each model."""

from __future__ import annotations

import time

import pytest

from helpers.raw_grpc import ask, text_inputs
from helpers.served import WAYS, Answer, served
from helpers.server import Server

TIMES = ("arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns", "last_token_time_ns")
BLOCKS = ("kv_cache_alloc_total_blocks", "kv_cache_reused_blocks", "kv_cache_alloc_new_blocks")
DRAFTS = ("acceptance_rate", "total_accepted_draft_tokens", "total_draft_tokens")
BLOCK = 64


def last(answer: Answer) -> dict[str, float]:
    return {name: answer.end(name) for name in (*TIMES, *BLOCKS, *DRAFTS)}


@pytest.mark.parametrize("prompt", ["Tell me about rivers.", [30, 31, 32, 33]], ids=["ensemble", "llm"])
@pytest.mark.parametrize("way", WAYS)
def test_every_response_reports_times_blocks_and_drafts(
    tiny: Server, way: str, prompt: str | list[int]
) -> None:
    before_ns = time.monotonic_ns()
    fields = {"max_tokens": 6, "ignore_eos": True, "return_perf_metrics": True, "num_draft_tokens": 0}
    answer = served(tiny, way, prompt, **fields)
    seen = last(answer)
    assert before_ns < seen["arrival_time_ns"]
    assert [seen[name] for name in TIMES] == sorted(seen[name] for name in TIMES)
    assert seen["last_token_time_ns"] < time.monotonic_ns()
    assert seen["last_token_time_ns"] > seen["first_token_time_ns"]
    assert [seen[name] for name in BLOCKS] == [1, 0, 1]
    assert [seen[name] for name in DRAFTS] == [0, 0, 0]
    for piece in answer.pieces:
        assert {*TIMES, *BLOCKS, *DRAFTS} <= piece.keys()
    newest = answer.all("last_token_time_ns")
    assert newest == sorted(newest)
    assert len(set(answer.all("first_token_time_ns"))) == 1


def test_the_text_model_reports_them_too(tiny: Server) -> None:
    inputs = text_inputs("Tell me about lakes.", 4, stream=False, return_perf_metrics=True)
    (response,) = ask(tiny.grpc, "text", inputs).responses
    times = [response[name].item() for name in TIMES]
    assert times == sorted(times)
    assert [response[name].shape for name in (*TIMES, *BLOCKS, *DRAFTS)] == [(1, 1)] * 10


def test_reused_blocks_are_those_of_the_prefix_cache(tiny: Server) -> None:
    prompt = [(7 * place) % 390 + 5 for place in range(3 * BLOCK + 5)]
    requested = {"return_perf_metrics": True, "return_num_cached_tokens": True, "max_tokens": BLOCK}
    first = served(tiny, "grpc", prompt, ignore_eos=True, **requested)
    again = served(tiny, "grpc", prompt, ignore_eos=True, **requested)
    assert [last(first)[name] for name in BLOCKS] == [5, 0, 5]
    assert [last(again)[name] for name in BLOCKS] == [2, 3, 2]
    assert again.all("num_cached_tokens") == [3 * BLOCK] * len(again.pieces)


def test_other_requests_do_not_get_them(tiny: Server) -> None:
    answer = served(tiny, "grpc", [30, 31, 32], max_tokens=3)
    assert not {*TIMES, *BLOCKS, *DRAFTS} & answer.pieces[-1].keys()
