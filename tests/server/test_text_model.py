"""The text model, in a single process, gives the ensemble's answers, by every protocol."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from helpers.raw_grpc import Outcome, Stream, ask, chunks, text_inputs
from helpers.server import Server, eventually

MESSAGES = json.dumps([{"role": "user", "content": "What is the capital of France?"}])
SEEDED = {"temperature": 0.9, "top_p": 0.95, "seed": np.array([[11]], dtype=np.uint64), "ignore_eos": True}
REQUESTED = dict.fromkeys(
    ("return_finish_reason", "return_num_input_tokens", "return_num_output_tokens", "return_log_probs"), True
)

CASES: dict[str, dict[str, Any]] = {
    "streamed": text_inputs("Emoji 😀👨‍👩‍👧‍👦 are", 16, **SEEDED, **REQUESTED),
    "not streamed": text_inputs("你好，世界。今天", 10, **SEEDED, **REQUESTED) | {"stream": False},
    "echoed": text_inputs("   leading", 12, stream=False) | {"exclude_input_in_output": False},
    "messages": {"messages": MESSAGES, "max_tokens": 20, "stream": True, **REQUESTED},
    "stop string": {"messages": MESSAGES, "max_tokens": 20, "stop_words": ["of France"], **REQUESTED},
    "biased words": text_inputs("The sky", 12, embedding_bias_words=["red"], embedding_bias_weights=[9.0]),
    "beams": text_inputs("Once upon a time", 8, beam_width=3) | {"stream": False},
    "several sequences": text_inputs("Once", 8, num_return_sequences=3, **SEEDED),
}


def said(outcome: Outcome) -> dict[tuple[int, str], Any]:
    """Each output of each sequence, joined because chunks may be divided differently."""
    assert (outcome.errors, outcome.num_finals, outcome.call_error) == ([], 1, "")
    values: dict[tuple[int, str], list[Any]] = {}
    for response in outcome.responses:
        index = int(response["sequence_index"].item()) if "sequence_index" in response else 0
        for name, array in response.items():
            values.setdefault((index, name), []).extend(array.reshape(-1).tolist())
    return {(index, name): _WHOLE.get(name, _last)(each) for (index, name), each in values.items()}


def _last(values: list[Any]) -> Any:
    return values[-1]


_WHOLE: dict[str, Callable[[list[Any]], Any]] = {
    "text_output": b"".join,
    "output_log_probs": list,
    "num_output_tokens": sum,
}


@pytest.mark.parametrize("case", CASES)
def test_the_outputs_are_the_ensembles(server: Server, case: str) -> None:
    by_ensemble, by_text = (ask(server.grpc, model, CASES[case]) for model in ("ensemble", "text"))
    expected, found = said(by_ensemble), said(by_text)
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        if key[1].endswith("log_probs"):
            np.testing.assert_allclose(found[key], values, atol=1e-3)
        else:
            assert found[key] == values, key


def test_http_gives_the_same_text(server: Server) -> None:
    body = {"messages": MESSAGES, "max_tokens": 20, "exclude_input_in_output": True}
    status, text = server.post("/v2/models/text/generate", body)
    assert (status, json.loads(text)["text_output"]) == (200, "The capital of France is Paris.")
    _, text = server.post("/v2/models/text/generate_stream", body | {"stream": True})
    pieces = [json.loads(line[6:])["text_output"] for line in text.splitlines() if line.startswith("data: ")]
    assert len(pieces) > 1
    assert "".join(pieces) == "The capital of France is Paris."


def test_one_instance_serves_many_at_once(server: Server) -> None:
    prompts = [f"Count from {number}:" for number in range(16)]
    alone = [ask(server.grpc, "text", text_inputs(each, 8, ignore_eos=True)).text for each in prompts[:2]]
    others = [
        Stream(server.grpc, "text", text_inputs(each, 1500, ignore_eos=True), request_id="others")
        for each in prompts[2:]
    ]
    eventually(lambda: server.metric("nv_trt_llm_request_metrics", request_type="scheduled") == 14, 30)
    streams = [Stream(server.grpc, "text", text_inputs(each, 8, ignore_eos=True)) for each in prompts[:2]]
    assert [stream.join().text for stream in streams] == alone
    assert not any(other.has_ended for other in others)
    ask(server.grpc, "text", {"stop": True}, request_id="others")
    outcomes = [stream.join() for stream in streams + others]
    assert all((outcome.errors, outcome.num_finals) == ([], 1) for outcome in outcomes)
    assert all(outcome.text for outcome in outcomes)


def test_a_deadline_ends_a_text_with_what_it_has(server: Server) -> None:
    inputs = text_inputs("Once", 1500, ignore_eos=True, return_finish_reason=True)
    outcome = ask(server.grpc, "text", inputs, timeout=1_500_000)
    assert (outcome.errors, outcome.num_finals) == ([], 1)
    assert list(chunks(outcome, "finish_reason"))[-1].item() == b"timeout"
    assert outcome.text


def test_its_latencies_carry_its_own_name(server: Server) -> None:
    name, labels = "vllm:time_to_first_token_seconds_count", {"model": "text", "version": "1"}
    assert not ask(server.grpc, "text", text_inputs("Hello", 2)).errors
    before = server.settled(name, **labels)
    assert not ask(server.grpc, "text", text_inputs("Hello", 2)).errors
    eventually(lambda: server.metric(name, **labels) == before + 1)


def test_neither_probes_nor_refusals_reach_the_engine(server: Server) -> None:
    before = server.settled("vllm:prompt_tokens_total")
    assert ask(server.grpc, "text", {"stop": True}, request_id="naiad-probe").num_finals == 1
    (refused,) = ask(server.grpc, "text", text_inputs("Hello", 2, image_url_input="http://x")).errors
    assert "image_url_input is not supported" in refused
    assert server.settled("vllm:prompt_tokens_total") == before
