"""Requests of HTTP benchmarks and gateways that were written for TensorRT-LLM's backend."""

from __future__ import annotations

import json
from typing import Any

import pytest

from helpers.raw_grpc import ask, llm_inputs, text_inputs
from helpers.server import Server

PROMPT = "The capital of France is"
# So many that they cannot all have been merged into one event.
NUM_TOKENS = 300

# Fields by sender: vLLM's benchmark and TensorRT-LLM's copy of it, and SGLang's.
BENCHMARKS: dict[str, dict[str, Any]] = {
    "vllm": {"temperature": 0.0, "top_p": 1.0},
    "vllm, ignoring the end": {"temperature": 0.0, "top_p": 1.0, "min_length": NUM_TOKENS},
    "sglang": {"temperature": 0.000001, "top_p": 1.0, "min_length": NUM_TOKENS, "end_id": 1_048_576},
}


@pytest.fixture(scope="module")
def greedy(tiny: Server) -> str:
    return ask(tiny.grpc, "ensemble", text_inputs(PROMPT, NUM_TOKENS)).text


@pytest.mark.parametrize("model", ["ensemble", "text"])
@pytest.mark.parametrize("fields", BENCHMARKS.values(), ids=BENCHMARKS.keys())
def test_a_benchmark_adds_up_its_events(
    tiny: Server, greedy: str, model: str, fields: dict[str, Any]
) -> None:
    body = {"accumulate_tokens": True, "text_input": PROMPT, "max_tokens": NUM_TOKENS, "stream": True}
    status, answer = tiny.post(f"/v2/models/{model}/generate_stream", body | fields)
    assert status == 200, answer
    events = [json.loads(line.removeprefix("data:")) for line in answer.splitlines() if line]
    assert len(events) > 1
    assert "".join(event["text_output"] for event in events) == greedy


@pytest.mark.parametrize("model", ["ensemble", "text"])
def test_a_gateway_nests_its_parameters(tiny: Server, greedy: str, model: str) -> None:
    fields = {"max_tokens": NUM_TOKENS, "bad_words": [""], "stop_words": [""]}
    body = {"text_input": PROMPT, "parameters": fields, "stream": False}
    status, answer = tiny.post(f"/v2/models/{model}/generate", body)
    assert status == 200, answer
    assert json.loads(answer)["text_output"] == PROMPT + greedy


def test_another_vocabularys_ids_end_and_pad_nothing(tiny: Server) -> None:
    ids = ask(tiny.grpc, "llm", llm_inputs([104, 375], NUM_TOKENS)).token_ids
    foreign = llm_inputs([104, 375], NUM_TOKENS, end_id=50256, pad_id=50256)
    assert ask(tiny.grpc, "llm", foreign).token_ids == ids
