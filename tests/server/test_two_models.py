"""Two models in one server: each has its own engine, memory, limits and metrics."""

from __future__ import annotations

import json
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from helpers.openai_api import post
from helpers.raw_grpc import ENDLESS, Outcome, Stream, ask, llm_inputs, text_inputs
from helpers.server import Leaving, Server, eventually, running
from helpers.tiny_repository import add_to_repository, create_repository, tiny_checkpoint

PREFIXES = ("", "second_")
# The models' names in the repository and at the OpenAI API.
FIRST, SECOND = "first", "second"
BUDGETS = {"llm": 40_000_000, "second_llm": 1_000_000}
# A block has 64 tokens, each with keys and values in float32 for 2 heads of each of 3 layers.
BLOCK_BYTES = 64 * 2 * 3 * 2 * 10 * 4


@pytest.fixture(scope="module")
def both(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory, leaving: Leaving) -> Iterator[Server]:
    """Two models with different limits."""
    folder = tmp_path_factory.mktemp("two_models")
    other = tiny_checkpoint(folder / "other", seed=1)
    repository = folder / "repository"
    budgets = {model: ("--kv-cache-bytes", str(budget)) for model, budget in BUDGETS.items()}
    limits = ("--max-num-seqs", "8", "--max-model-len", "32768")
    create_repository(repository, tiny_dir, *limits, *budgets["llm"])
    limits = ("--max-num-seqs", "4", "--max-model-len", "1024")
    add_to_repository(repository, other, SECOND, *limits, *budgets["second_llm"])
    options = ("--openai-port", "0", "--openai-fallback", f"{SECOND}={FIRST}")
    with running(leaving, repository, *options) as server:
        yield server


def greedy(server: Server, prefix: str, model: str = "ensemble") -> Outcome:
    return ask(server.grpc, f"{prefix}{model}", text_inputs("The quick", 12, ignore_eos=True))


def engine_of(server: Server, model: str) -> psutil.Process:
    return next(p for p in server.processes("naiad.engine_process") if f"/{model}." in " ".join(p.cmdline()))


def test_both_answer_with_their_own_model(both: Server) -> None:
    first, second = (greedy(both, prefix) for prefix in PREFIXES)
    for outcome in (first, second):
        assert (outcome.errors, outcome.num_finals) == ([], 1)
    assert first.text != second.text
    assert greedy(both, "").text == first.text
    assert [greedy(both, prefix, "text").text for prefix in PREFIXES] == [first.text, second.text]


def test_each_has_its_own_limits(both: Server) -> None:
    prompt = [7] * 1100
    assert not ask(both.grpc, "llm", llm_inputs(prompt, 1)).errors
    (refused,) = ask(both.grpc, "second_llm", llm_inputs(prompt, 1)).errors
    said = "the prompt has 1100 tokens: at most 1023 are allowed (max_model_len = 1024,"
    assert said in refused


def test_huge_max_tokens_is_clamped_to_the_window(both: Server) -> None:
    inputs = llm_inputs([1] * 1016, 2**31 - 1, ignore_eos=True, return_finish_reason=True)
    outcome = ask(both.grpc, "second_llm", inputs)
    assert len(outcome.token_ids) == 8
    assert outcome.responses[-1]["finish_reason"].item() == b"length"


def test_each_has_its_own_memory(both: Server) -> None:
    def blocks(model: str, kind: str) -> float:
        return both.metric("nv_trt_llm_kv_cache_block_metrics", kv_cache_block_type=kind, model=model)

    for model, budget in BUDGETS.items():
        assert blocks(model, "max") == budget // BLOCK_BYTES
    inputs = llm_inputs([7, 8] * 1100, ENDLESS, ignore_eos=True)
    stream = Stream(both.grpc, "llm", inputs, request_id="stop-me")
    assert stream.got_response.wait(60)
    # More blocks than the small model has in all.
    eventually(lambda: blocks("llm", "used") > blocks("second_llm", "max"))
    assert blocks("second_llm", "used") == 0
    outcome = greedy(both, "second_")
    assert (outcome.errors, outcome.num_finals) == ([], 1)
    assert not stream.has_ended
    ask(both.grpc, "llm", llm_inputs([1], 1, stop=True), request_id="stop-me")
    assert stream.join(60).num_finals == 1


def test_metrics_are_labelled_apart(both: Server) -> None:
    def generated(model: str) -> float:
        return both.settled("vllm:generation_tokens_total", model=model, version="1")

    before = {model: generated(model) for model in ("llm", "second_llm")}
    assert not ask(both.grpc, "second_llm", llm_inputs([5, 6], 9, ignore_eos=True)).errors
    eventually(lambda: generated("second_llm") == before["second_llm"] + 9)
    assert generated("llm") == before["llm"]
    for model, limit in (("llm", 8), ("second_llm", 4)):
        assert both.metric("nv_trt_llm_request_metrics", request_type="max", model=model) == limit


def test_a_killed_engine_leaves_the_other_unharmed(both: Server) -> None:
    expected = greedy(both, "").text
    stub, victim = engine_of(both, "llm").parent(), engine_of(both, "second_llm")
    streams = {}
    for prefix in PREFIXES:
        inputs = text_inputs("Story", ENDLESS, ignore_eos=True)
        streams[prefix] = Stream(both.grpc, f"{prefix}ensemble", inputs, request_id="stop-me")
        assert streams[prefix].got_response.wait(60)
    victim.send_signal(signal.SIGKILL)
    lost = streams["second_"].join(60)
    assert (len(lost.errors), lost.num_finals) == (1, 1)
    assert not streams[""].has_ended
    ask(both.grpc, "llm", llm_inputs([1], 1, stop=True), request_id="stop-me")
    unharmed = streams[""].join(60)
    assert (unharmed.errors, unharmed.num_finals) == ([], 1)
    assert greedy(both, "").text == expected
    eventually(lambda: not greedy(both, "second_").errors, 30)
    assert engine_of(both, "llm").parent() == stub


def test_the_first_answers_for_the_second_while_that_is_away(both: Server) -> None:
    def answering_model() -> str:
        status, _, raw = post(both, "/v1/completions", {"model": SECOND, "prompt": "a", "max_tokens": 2})
        assert status == 200, raw
        return str(json.loads(raw)["model"])

    models = f"{both.openai}/models"
    eventually(lambda: SECOND in urllib.request.urlopen(models).read().decode())
    assert answering_model() == SECOND
    engine = engine_of(both, "second_llm")
    owner = engine.parent()
    assert owner is not None
    # Until its owner goes on, the engine does not come back.
    owner.send_signal(signal.SIGSTOP)
    try:
        engine.send_signal(signal.SIGKILL)
        eventually(lambda: answering_model() == FIRST)
    finally:
        owner.send_signal(signal.SIGCONT)
    with urllib.request.urlopen(f"{both.openai.removesuffix('/v1')}/metrics") as answer:
        page = answer.read().decode()
    (line,) = [each for each in page.splitlines() if each.startswith("naiad_openai_fallbacks_total{")]
    assert f'model="{SECOND}"' in line
    assert f'fallback="{FIRST}"' in line
    eventually(lambda: answering_model() == SECOND)
