"""A server with a target for the first token refuses what would be late, and serves all else to its end."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

import pytest
from tritonclient.utils import InferenceServerException

from helpers.openai_api import COMPLETIONS, MODEL, post, whole
from helpers.preset_server import infer
from helpers.raw_grpc import ENDLESS, Outcome, Stream, ask, llm_inputs
from helpers.served import WAYS, ask_by, served
from helpers.server import Leaving, Server, eventually, running
from helpers.tiny_repository import add_to_repository, create_repository, tiny_checkpoint

SLOTS = 2
TARGET_MS = 2000
PROMPT_TOKENS, OUTPUT_TOKENS = 250, 4
# While nobody leaves a slot, what is expected grows with every second and every prompt that waits, so a flood
# is much smaller.
MOST = 500
OPTIONS = ("--max-num-seqs", str(SLOTS), "--kv-cache-bytes", "64000000")
LLMS = ("llm", "unary_llm")
LATE = f"s (target_first_token_ms = {TARGET_MS})"


@pytest.fixture(scope="module")
def punctual(tmp_path_factory: pytest.TempPathFactory, leaving: Leaving) -> Iterator[Server]:
    """Serves `first`, and `unary`, whose calls have a gRPC status."""
    folder = tmp_path_factory.mktemp("punctual")
    checkpoint, repository = tiny_checkpoint(folder / "checkpoint"), folder / "repository"
    options = (*OPTIONS, "--target-first-token-ms", str(TARGET_MS))
    create_repository(repository, checkpoint, *options)
    add_to_repository(repository, checkpoint, "unary", "--no-decoupled", *options)
    with running(leaving, repository, "--openai-port", "0") as server:
        for llm in LLMS:
            # Nothing is refused before the speed of prompts has been measured.
            assert outcome_of(server, llm, 0).errors == []
        yield server


def prompt(number: int) -> list[int]:
    draw = random.Random(number)
    return [draw.randrange(100, 300) for _ in range(PROMPT_TOKENS)]


def inputs_of(llm: str, number: int, num_tokens: int = OUTPUT_TOKENS) -> dict[str, object]:
    return llm_inputs(prompt(number), num_tokens, ignore_eos=True) | {"streaming": llm == "llm"}


def outcome_of(server: Server, llm: str, number: int) -> Outcome:
    return ask(server.grpc, llm, inputs_of(llm, number))


def gauge(server: Server, llm: str, request_type: str) -> float:
    return server.metric("nv_trt_llm_request_metrics", request_type=request_type, model=llm)


def used_blocks(server: Server, llm: str) -> float:
    name = "nv_trt_llm_kv_cache_block_metrics"
    return server.metric(name, kv_cache_block_type="used", model=llm)


def hold_slots(server: Server, llm: str) -> list[Stream]:
    inputs = llm_inputs([5, 6, 7], ENDLESS, ignore_eos=True) | {"streaming": llm == "llm"}
    streams = [Stream(server.grpc, llm, inputs, request_id="hold") for _ in range(SLOTS)]
    eventually(lambda: gauge(server, llm, "scheduled") == SLOTS)
    return streams


def free_slots(server: Server, llm: str, streams: list[Stream]) -> None:
    assert not any(stream.has_ended for stream in streams)
    order = llm_inputs([1], 1, stop=True) | {"streaming": llm == "llm"}
    assert ask(server.grpc, llm, order, request_id="hold").errors == []
    for stream in streams:
        assert stream.join().errors == []


def flood(server: Server, llm: str) -> list[Stream]:
    """Send prompts, while the slots are held, until one of them has been refused."""
    streams: list[Stream] = []
    while not any(stream.has_ended for stream in streams):
        assert len(streams) < MOST, "none was refused"
        streams.append(Stream(server.grpc, llm, inputs_of(llm, len(streams) + 1)))
        streams[-1].got_response.wait(0.05)
    return streams


def check_ends(streams: list[Stream]) -> None:
    """Each was refused with the target's message, or has all of its tokens."""
    outcomes = [stream.join() for stream in streams]
    assert {outcome.num_finals for outcome in outcomes} == {1}
    assert any(outcome.errors for outcome in outcomes)
    for outcome in outcomes:
        if outcome.errors:
            assert "the queue is full: the first token is expected in" in outcome.errors[0]
            assert outcome.errors[0].endswith(LATE)
        assert len(outcome.token_ids) == (0 if outcome.errors else OUTPUT_TOKENS)


@pytest.mark.parametrize("llm", LLMS)
def test_a_flood_is_refused_in_part_and_what_is_accepted_ends_whole(punctual: Server, llm: str) -> None:
    holders = hold_slots(punctual, llm)
    streams = flood(punctual, llm)
    # The first refusal has come although nobody has left a slot.
    free_slots(punctual, llm, holders)
    check_ends(streams)
    assert streams[0].outcome.errors == []
    eventually(lambda: gauge(punctual, llm, "active") == 0)
    eventually(lambda: used_blocks(punctual, llm) == 0)
    assert len(outcome_of(punctual, llm, 0).token_ids) == OUTPUT_TOKENS


@pytest.mark.parametrize("way", WAYS)
def test_an_idle_server_serves(punctual: Server, way: str) -> None:
    for llm_prompt in ([5, 6, 7], "Hello"):
        served(punctual, way, llm_prompt)


def test_the_refusal_of_a_unary_call_is_unavailable(punctual: Server) -> None:
    holders = hold_slots(punctual, "unary_llm")
    streams = flood(punctual, "unary_llm")
    with pytest.raises(InferenceServerException, match=f"target_first_token_ms = {TARGET_MS}") as refusal:
        infer(punctual, "unary_llm", inputs_of("unary_llm", MOST + 1))
    assert refusal.value.status() == "StatusCode.UNAVAILABLE"
    free_slots(punctual, "unary_llm", holders)
    check_ends(streams)


@pytest.mark.parametrize("stream", [False, True])
def test_the_refusal_of_the_openai_server_is_503_and_says_when_to_come_back(
    punctual: Server, stream: bool
) -> None:
    holders = hold_slots(punctual, "llm")
    streams = flood(punctual, "llm")
    body = {"model": MODEL, "prompt": prompt(MOST + 1), "max_tokens": OUTPUT_TOKENS, "stream": stream}
    status, headers, raw = post(punctual, COMPLETIONS, body)
    assert (status, headers["retry-after"] in ("1", "2", "3")) == (503, True)
    assert json.loads(raw)["error"]["message"].endswith(LATE)
    free_slots(punctual, "llm", holders)
    check_ends(streams)
    assert whole(punctual, COMPLETIONS, prompt="Hello", max_tokens=4).usage["completion_tokens"] > 0


@pytest.mark.parametrize("way", WAYS)
def test_what_ends_before_its_first_token_is_refused(punctual: Server, way: str) -> None:
    # A microsecond is less than any prompt takes.
    error = ask_by(punctual, way, prompt(MOST + 2), timeout=1).error
    assert "the first token is expected in" in error
    assert error.endswith("after the request's time limit")
