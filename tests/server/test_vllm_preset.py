"""The vLLM backend's model, as that backend's clients use it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from helpers.raw_grpc import ENDLESS, Outcome, Stream, ask, chunks
from helpers.server import Leaving, Server, eventually, running
from helpers.tiny_repository import create_repository, tiny_checkpoint

PROMPT = "The quick"
MODEL = "vllm_model"
GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory, leaving: Leaving) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("vllm")
    create_repository(folder / "repository", tiny_checkpoint(folder / "checkpoint"), "--preset", "vllm")
    with running(leaving, folder / "repository", "--log-verbose", "1") as server:
        yield server


def inputs(sampling: dict[str, Any] | None = None, **tensors: Any) -> dict[str, Any]:
    made: dict[str, Any] = {"text_input": PROMPT, **tensors}
    if sampling is not None:
        made["sampling_parameters"] = json.dumps(sampling)
    return {name: as_vector(value) for name, value in made.items()}


def as_vector(value: Any) -> Any:
    """A tensor [1]: this model has no batch dimension."""
    if isinstance(value, str):
        return np.array([value.encode()], dtype=np.object_)
    return np.array([value])


def say(server: Server, sampling: dict[str, Any] | None = None, **tensors: Any) -> Outcome:
    outcome = ask(server.grpc, MODEL, inputs(sampling, **tensors))
    assert (outcome.errors, outcome.num_finals, outcome.call_error) == ([], 1, "")
    return outcome


def test_the_ready_message_shows_an_example_request(vllm: Server) -> None:
    eventually(lambda: any("Ctrl-C stops it" in line for line in vllm.lines))
    said = "\n".join(vllm.lines)
    assert f"/v2/models/{MODEL}/generate_stream" in said
    # Our client sends tensors with a batch dimension, which this model does not take.
    assert "naiad_client" not in said


def test_streamed_texts_add_up_to_the_unstreamed_one(vllm: Server) -> None:
    # Enough tokens that the first response arrives before the last token, even if chunks are merged.
    sampling = {**GREEDY, "max_tokens": 300}
    streamed = say(vllm, sampling, stream=True, return_finish_reason=True, return_num_output_tokens=True)
    plain = say(vllm, sampling, exclude_input_in_output=True)
    assert len(streamed.responses) > 1
    assert streamed.text == plain.text
    reasons = [each.item() for each in chunks(streamed, "finish_reason")]
    assert set(reasons[:-1]) == {b"None"}
    assert reasons[-1] == b"length"
    assert sum(each.item() for each in chunks(streamed, "num_output_tokens")) == 300


def test_the_prompt_stands_before_an_unstreamed_text(vllm: Server) -> None:
    assert say(vllm, GREEDY).text == PROMPT + say(vllm, GREEDY, exclude_input_in_output=True).text


def test_sampling_is_vllms(vllm: Server) -> None:
    seeded = {"seed": 5, "max_tokens": 12, "ignore_eos": True}
    texts = {
        name: say(vllm, {**seeded, **more}).text
        for name, more in {
            "default": {},
            "temperature 1": {"temperature": "1.0"},
            "other seed": {"seed": "6"},
            "greedy": {"temperature": 0},
        }.items()
    }
    assert texts["default"] == texts["temperature 1"]
    assert len(set(texts.values())) == 3


def test_sixteen_tokens_are_the_default(vllm: Server) -> None:
    outcome = say(vllm, {"ignore_eos": True}, return_num_output_tokens=True, return_num_input_tokens=True)
    (response,) = outcome.responses
    assert response["num_output_tokens"].tolist() == [16]
    assert response["num_output_tokens"].dtype == response["num_input_tokens"].dtype == np.uint32


def test_log_probs_and_sequences(vllm: Server) -> None:
    sampling = {**GREEDY, "temperature": 0.8, "seed": 3, "n": 2, "logprobs": 2}
    requested = {"return_logprobs": True, "return_cumulative_logprob": True, "return_finish_reason": True}
    (response,) = say(vllm, sampling, **requested).responses
    assert response["text_output"].shape == response["cumulative_logprob"].shape == (2,)
    for text, total in zip(response["logprobs"].tolist(), response["cumulative_logprob"], strict=True):
        shown = json.loads(text)
        assert len(shown) == 12
        first = [next(iter(each.values())) for each in shown]
        assert sum(each["logprob"] for each in first) == pytest.approx(float(total), abs=1e-3)
        assert all(set(each) == {"logprob", "rank", "decoded_token"} for each in first)


def test_http_parameters_are_sampling_parameters(vllm: Server) -> None:
    expected = say(vllm, GREEDY, exclude_input_in_output=True).text
    body = {"text_input": PROMPT, "exclude_input_in_output": True, "parameters": GREEDY}
    status, answer = vllm.post(f"/v2/models/{MODEL}/generate", body)
    assert (status, json.loads(answer)["text_output"]) == (200, expected)
    _, answer = vllm.post(
        f"/v2/models/{MODEL}/generate_stream", {"text_input": PROMPT, "stream": True, **GREEDY}
    )
    pieces = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith("data: ")]
    assert "".join(piece["text_output"] for piece in pieces) == expected


@pytest.mark.parametrize(
    ("sampling", "tensors", "message"),
    [
        (
            {},
            {"stream": True, "exclude_input_in_output": False},
            "When streaming, `exclude_input_in_output` = False is not allowed.",
        ),
        ({"temperature": -1}, {}, "temperature = -1.0"),
        ({"lora_name": "alpaca"}, {}, "lora_name = 'alpaca' is not supported"),
        ({"surprise": 1}, {}, "unknown key 'surprise'"),
        ({}, {"image": "aGk="}, "image is not supported"),
    ],
)
def test_errors_are_worded_as_vllms(
    vllm: Server, sampling: dict[str, Any], tensors: dict[str, Any], message: str
) -> None:
    outcome = ask(vllm.grpc, MODEL, inputs(sampling, **tensors))
    (error,) = outcome.errors
    assert "Error generating stream: " in error
    assert message in error
    assert (outcome.num_finals, outcome.responses) == (1, [])


def test_a_client_that_goes_away_is_cancelled_and_logged(vllm: Server) -> None:
    sampling = {"max_tokens": ENDLESS, "ignore_eos": True}
    stream = Stream(vllm.grpc, MODEL, inputs(sampling, stream=True))
    assert stream.got_response.wait(30)
    eventually(lambda: vllm.used_blocks() > 0)
    stream.cancel()
    eventually(lambda: vllm.used_blocks() == 0)
    for line in ("[vllm] Cancelling the request", "[vllm] Successfully cancelled the request"):
        eventually(lambda line=line: any(line in each for each in vllm.lines))


def test_a_stopped_request_ends_with_vllms_error(vllm: Server) -> None:
    sampling = {"max_tokens": ENDLESS, "ignore_eos": True}
    stream = Stream(vllm.grpc, MODEL, inputs(sampling, stream=True), request_id="stop-me")
    assert stream.got_response.wait(30)
    order = {"input_ids": [1], "input_lengths": 1, "request_output_len": 1, "stop": True}
    assert ask(vllm.grpc, "llm", order, request_id="stop-me").num_finals == 1
    outcome = stream.join(30)
    assert (len(outcome.errors), outcome.num_finals) == (1, 1)
    assert "Request was cancelled" in outcome.errors[0]
    assert "Error generating stream" not in outcome.errors[0]


def test_a_lost_engine_ends_streams_and_the_next_one_serves(vllm: Server) -> None:
    expected = say(vllm, GREEDY).text
    stream = Stream(vllm.grpc, MODEL, inputs({"max_tokens": ENDLESS, "ignore_eos": True}, stream=True))
    assert stream.got_response.wait(30)
    vllm.processes("naiad.engine_process")[0].kill()
    outcome = stream.join(30)
    assert (len(outcome.errors), outcome.num_finals) == (1, 1)
    assert "engine" in outcome.errors[0]
    eventually(lambda: not ask(vllm.grpc, MODEL, inputs(GREEDY)).errors, 60)
    assert say(vllm, GREEDY).text == expected
