"""Two models of one repository in one server: each has its own engine, limits and metrics."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import psutil
import pytest

from helpers.raw_grpc import Outcome, Stream, ask, llm_inputs, text_inputs
from helpers.server import Server, eventually, start_repository
from helpers.tiny_repository import add_to_repository, create_repository, tiny_checkpoint

PREFIXES = ("", "second_")


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two random models with different limits."""
    folder = tmp_path_factory.mktemp("two_models")
    checkpoints = [tiny_checkpoint(folder / f"checkpoint{seed}", seed) for seed in (1, 2)]
    create_repository(folder / "repository", checkpoints[0], "--max-num-seqs", "8")
    add_to_repository(
        folder / "repository", checkpoints[1], "second", "--max-num-seqs", "4", "--max-model-len", "1024"
    )
    running = start_repository("--model-repository", str(folder / "repository"))
    yield running
    assert running.stop() == 0, "\n".join(running.lines[-40:])


def greedy(server: Server, prefix: str) -> Outcome:
    return ask(server.grpc, f"{prefix}ensemble", text_inputs("The quick", 12, ignore_eos=True))


def engine_of(server: Server, model: str) -> psutil.Process:
    return next(p for p in server.processes("naiad.engine_process") if f"/{model}." in " ".join(p.cmdline()))


def test_both_answer_with_their_own_model(both: Server) -> None:
    first, second = (greedy(both, prefix) for prefix in PREFIXES)
    for outcome in (first, second):
        assert (outcome.errors, outcome.num_finals) == ([], 1)
    assert first.text != second.text
    assert greedy(both, "").text == first.text


def test_each_has_its_own_limits(both: Server) -> None:
    prompt = [7] * 1500
    assert not ask(both.grpc, "llm", llm_inputs(prompt, 1)).errors
    (refused,) = ask(both.grpc, "second_llm", llm_inputs(prompt, 1)).errors
    assert "1024" in refused


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
    stub = engine_of(both, "llm").parent()
    streams = {
        prefix: Stream(both.grpc, f"{prefix}ensemble", text_inputs("Story", 600, ignore_eos=True))
        for prefix in PREFIXES
    }
    assert all(stream.got_response.wait(60) for stream in streams.values())
    engine_of(both, "second_llm").send_signal(signal.SIGKILL)
    outcomes = {prefix: stream.join(60) for prefix, stream in streams.items()}
    assert (len(outcomes["second_"].errors), outcomes["second_"].num_finals) == (1, 1)
    assert (outcomes[""].errors, outcomes[""].num_finals) == ([], 1)
    assert greedy(both, "").text == expected
    eventually(lambda: not greedy(both, "second_").errors, 30)
    assert engine_of(both, "llm").parent() == stub
