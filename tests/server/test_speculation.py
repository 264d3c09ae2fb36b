"""A server that drafts gives the same tokens, streamed; statistics and metrics of its drafts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.raw_grpc import ENDLESS, Stream, ask, text_inputs
from helpers.served import WAYS, served
from helpers.server import Leaving, Server, eventually, start_server

REPEATING = "Say it again and again: red green blue, red green blue, red green blue, red green"


@pytest.fixture(scope="module")
def drafting(tiny_dir: Path, leaving: Leaving) -> Iterator[Server]:
    running = start_server(
        tiny_dir,
        *("--dtype", "float32"),
        *("--drafter", "suffix", "--num-speculative-tokens", "4"),
    )
    yield running
    leaving.take(running)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 0.9, "seed": 4, "top_p": 0.9}], ids=["greedy", "drawn"]
)
def test_tokens_are_those_without_drafts(drafting: Server, way: str, sampling: dict[str, float]) -> None:
    fields = {"max_tokens": 60, "ignore_eos": True, **sampling}
    plain = served(drafting, way, REPEATING, num_draft_tokens=0, **fields)
    drafted = served(drafting, way, REPEATING, num_draft_tokens=4, **fields)
    assert drafted.text == plain.text
    assert plain.all("total_draft_tokens") == []
    assert drafted.end("total_draft_tokens") >= drafted.end("total_accepted_draft_tokens") > 0
    rate = drafted.end("total_accepted_draft_tokens") / drafted.end("total_draft_tokens")
    assert drafted.end("acceptance_rate") == pytest.approx(rate)


@pytest.mark.parametrize("way", WAYS)
def test_a_clients_own_drafts_are_tried(drafting: Server, way: str) -> None:
    prompt = [30, 31, 32, 33]
    plain = served(drafting, way, prompt, max_tokens=12, ignore_eos=True, num_draft_tokens=0)
    guess = [*plain.token_ids[:8], 1, 1]
    made = served(drafting, way, prompt, max_tokens=12, ignore_eos=True, draft_input_ids=guess)
    assert made.token_ids == plain.token_ids
    assert made.end("total_accepted_draft_tokens") > 0


def test_a_crowd_gets_its_tokens_and_one_final_each(drafting: Server) -> None:
    inputs = [text_inputs(f"{REPEATING} {n}", 40, ignore_eos=True) for n in range(8)]
    alone = [ask(drafting.grpc, "ensemble", each).text for each in inputs]
    streams = [Stream(drafting.grpc, "ensemble", each) for each in inputs]
    outcomes = [stream.join() for stream in streams]
    assert [outcome.text for outcome in outcomes] == alone
    assert [outcome.num_finals for outcome in outcomes] == [1] * 8


def test_a_cancel_gives_all_blocks_back(drafting: Server) -> None:
    name = "vllm:spec_decode_num_draft_tokens_total"
    before = drafting.settled(name)
    stream = Stream(drafting.grpc, "ensemble", text_inputs(f"{REPEATING}.", ENDLESS, ignore_eos=True))
    assert stream.got_response.wait(60)
    # From now on every step verifies drafts.
    eventually(lambda: drafting.metric(name) > before + 20, 60)
    num_before = drafting.num_aborted()
    stream.cancel()
    eventually(lambda: drafting.used_blocks() == 0)
    eventually(lambda: drafting.num_aborted() == num_before + 1)


def test_metrics_count_drafts_by_place(drafting: Server) -> None:
    name = "vllm:spec_decode_num_accepted_tokens"

    def by_place() -> list[float]:
        return [drafting.metric(f"{name}_per_pos_total", position=str(place)) for place in range(4)]

    before = drafting.settled(f"{name}_total")
    served(drafting, "grpc", REPEATING, max_tokens=30, ignore_eos=True)
    eventually(lambda: before < drafting.settled(f"{name}_total") == sum(by_place()))
    places = by_place()
    assert places == sorted(places, reverse=True)
    assert drafting.metric("vllm:spec_decode_num_draft_tokens_total") >= sum(places)
    assert drafting.metric("vllm:spec_decode_num_drafts_total") >= places[0]
