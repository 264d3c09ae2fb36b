"""Repositories with TensorRT-LLM's names: streaming, and unary for clients without streams."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from helpers.openai_api import COMPLETIONS, post, streamed
from helpers.preset_server import infer
from helpers.raw_grpc import ENDLESS, Stream, as_tensor, ask, llm_inputs, text_inputs
from helpers.remote_door import running_door
from helpers.server import Leaving, Server, eventually, running
from helpers.tiny_repository import add_to_repository, create_repository, tiny_checkpoint

PROMPT = "The quick"
UNARY = {"max_tokens": 12, "text_input": PROMPT, "ignore_eos": True, "exclude_input_in_output": True}


@pytest.fixture(scope="module")
def trtllm(tmp_path_factory: pytest.TempPathFactory, leaving: Leaving) -> Iterator[Server]:
    """A model with the plain names, and the same model unary."""
    folder = tmp_path_factory.mktemp("trtllm")
    checkpoint = tiny_checkpoint(folder / "checkpoint")
    create_repository(folder / "repository", checkpoint, "--preset", "trtllm")
    accumulating = folder / "repository" / "tensorrt_llm_bls" / "config.pbtxt"
    text = accumulating.read_text()
    before = 'key: "accumulate_tokens" value: { string_value: "false"'
    assert before in text
    accumulating.write_text(text.replace(before, before.replace("false", "true")))
    add_to_repository(folder / "repository", checkpoint, "unary", "--preset", "trtllm", "--no-decoupled")
    with running(leaving, folder / "repository") as server:
        yield server


def test_tensorrt_llms_clients_find_their_models(trtllm: Server) -> None:
    inputs = text_inputs(PROMPT, 12, ignore_eos=True)
    by_ensemble = ask(trtllm.grpc, "ensemble", inputs)
    assert (by_ensemble.errors, by_ensemble.num_finals) == ([], 1)
    query = infer(trtllm, "preprocessing", {"QUERY": PROMPT, "REQUEST_OUTPUT_LEN": 12})
    ids = query["INPUT_ID"].reshape(-1).tolist()
    by_llm = ask(trtllm.grpc, "tensorrt_llm", llm_inputs(ids, 12, ignore_eos=True))
    tokens = np.array([[ids + by_llm.token_ids]], dtype=np.int32)
    batch = {"TOKENS_BATCH": tokens, "SEQUENCE_LENGTH": [tokens.size]}
    decoded = ask(trtllm.grpc, "postprocessing", batch).responses[0]["OUTPUT"].item().decode()
    assert decoded == PROMPT + by_ensemble.text


def test_the_engines_metrics_carry_tensorrt_llms_model_name(trtllm: Server) -> None:
    assert trtllm.metric("nv_trt_llm_request_metrics", request_type="max", model="tensorrt_llm") == 32


def test_accumulated_tokens_are_the_whole_text_so_far(trtllm: Server) -> None:
    inputs = text_inputs(PROMPT, 12, ignore_eos=True)
    whole = ask(trtllm.grpc, "ensemble", inputs).text
    outcome = ask(trtllm.grpc, "tensorrt_llm_bls", inputs)
    texts = [each["text_output"].item().decode() for each in outcome.responses]
    assert texts[-1] == whole
    assert all(whole.startswith(text) for text in texts)
    assert (outcome.num_finals, outcome.errors) == (1, [])


def test_stop_at_the_engines_model_reaches_the_bls(trtllm: Server) -> None:
    inputs = text_inputs(PROMPT, ENDLESS, ignore_eos=True, return_finish_reason=True)
    stream = Stream(trtllm.grpc, "tensorrt_llm_bls", inputs, request_id="stop-me")
    assert stream.got_response.wait(30)
    order = ask(trtllm.grpc, "tensorrt_llm", llm_inputs([1], 1, stop=True), request_id="stop-me")
    assert order.num_finals == 1
    outcome = stream.join(30)
    assert outcome.responses[-1]["finish_reason"].item() == b"cancelled"


@pytest.mark.parametrize("model", ["unary_ensemble", "unary_tensorrt_llm_bls"])
def test_unary_text_is_the_streamed_text(trtllm: Server, model: str) -> None:
    expected = ask(trtllm.grpc, "ensemble", text_inputs(PROMPT, 12, ignore_eos=True)).text
    assert infer(trtllm, model, UNARY)["text_output"].item().decode() == expected
    echoed = infer(trtllm, model, UNARY | {"exclude_input_in_output": False})
    assert echoed["text_output"].item().decode() == PROMPT + expected
    status, answer = trtllm.post(f"/v2/models/{model}/generate", UNARY)
    assert (status, json.loads(answer)["text_output"]) == (200, expected)
    stopped = infer(trtllm, model, UNARY | {"stop_words": expected[4:6]})
    assert stopped["text_output"].item().decode() == expected[: expected.index(expected[4:6])]


@pytest.mark.parametrize("model", ["unary_ensemble", "unary_tensorrt_llm_bls"])
def test_unary_beams_come_together(trtllm: Server, model: str) -> None:
    made = infer(trtllm, model, UNARY | {"beam_width": 2})
    streamed = ask(trtllm.grpc, "ensemble", UNARY | {"beam_width": 2, "stream": False})
    assert made["text_output"].tolist() == streamed.responses[0]["text_output"].tolist()
    assert made["text_output"].shape == (2,)


@pytest.mark.parametrize("model", ["unary_ensemble", "unary_tensorrt_llm_bls", "unary_tensorrt_llm"])
def test_unary_models_refuse_what_needs_several_responses(trtllm: Server, model: str) -> None:
    inputs = UNARY if model != "unary_tensorrt_llm" else llm_inputs([5, 6], 4) | {"streaming": False}
    stream = "streaming" if model == "unary_tensorrt_llm" else "stream"
    with pytest.raises(InferenceServerException, match=r"Streaming is only supported in decoupled mode\."):
        infer(trtllm, model, inputs | {stream: True})
    with pytest.raises(InferenceServerException, match="the request asks for 2 responses"):
        infer(trtllm, model, inputs | {"num_return_sequences": 2, "temperature": 0.5})
    doubled = {name: np.repeat(as_tensor(value), 2, axis=0) for name, value in inputs.items()}
    with pytest.raises(InferenceServerException, match="the request asks for 2 responses"):
        infer(trtllm, model, doubled)


def test_unary_requests_are_batched_in_flight(trtllm: Server) -> None:
    def metric(name: str, **labels: str) -> float:
        return trtllm.metric(name, model="unary_tensorrt_llm", **labels)

    expected = infer(trtllm, "unary_tensorrt_llm_bls", UNARY)["text_output"].item().decode()
    num_before = trtllm.settled("vllm:generation_tokens_total", model="unary_tensorrt_llm")
    inputs = {**UNARY, "max_tokens": ENDLESS}
    client = triton.InferenceServerClient(trtllm.grpc)
    answers: list[Any] = []
    for _ in range(8):
        tensors = []
        for name, value in inputs.items():
            array = as_tensor(value)
            tensors.append(triton.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype)))
            tensors[-1].set_data_from_numpy(array)
        client.async_infer(
            "unary_tensorrt_llm_bls",
            tensors,
            lambda result, error: answers.append(error or result),
            request_id="stop-me",
        )
    eventually(lambda: metric("nv_trt_llm_request_metrics", request_type="scheduled") == 8)
    eventually(lambda: metric("vllm:generation_tokens_total") > num_before + 8 * 40)
    assert answers == []
    infer(trtllm, "unary_tensorrt_llm_bls", {"stop": True}, request_id="stop-me")
    eventually(lambda: len(answers) == 8, 60)
    texts = sorted((answer.as_numpy("text_output").item().decode() for answer in answers), key=len)
    assert texts[-1].startswith(expected)
    # A text may have been stopped inside a character.
    assert all(texts[-1].startswith(text.rstrip("\ufffd")) for text in texts)


def test_a_unary_stop_has_an_empty_answer(trtllm: Server) -> None:
    order = llm_inputs([1], 1, stop=True) | {"streaming": False}
    assert infer(trtllm, "unary_tensorrt_llm", order, request_id="nobody") == {}
    assert infer(trtllm, "unary_tensorrt_llm_bls", {"stop": True}, request_id="nobody") == {}


def test_a_unary_deadline_is_kept(trtllm: Server) -> None:
    inputs = {**UNARY, "max_tokens": ENDLESS, "return_finish_reason": True}
    made = infer(trtllm, "unary_ensemble", inputs, timeout=1_000_000)
    assert made["finish_reason"].item() == b"timeout"


def infer_body(**inputs: Any) -> dict[str, Any]:
    """A body in the format of KServe's HTTP protocol."""
    kinds = {str: "BYTES", bool: "BOOL", int: "INT32"}
    tensors = [
        {"name": name, "shape": [1, 1], "datatype": kinds[type(value)], "data": [value]}
        for name, value in inputs.items()
    ]
    return {"inputs": tensors}


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_http_infer_is_for_unary_models(trtllm: Server, model: str) -> None:
    expected = ask(trtllm.grpc, "ensemble", text_inputs(PROMPT, 12, ignore_eos=True)).text
    status, text = trtllm.post(f"/v2/models/unary_{model}/infer", infer_body(**UNARY))
    assert status == 200
    outputs = {each["name"]: each for each in json.loads(text)["outputs"]}
    assert outputs["text_output"]["data"] == [expected]
    assert outputs["text_output"]["datatype"] == "BYTES"
    status, text = trtllm.post(f"/v2/models/{model}/infer", infer_body(**UNARY))
    assert status == 501
    assert "decoupled" in text


def test_the_openai_api_in_front_of_it_offers_what_can_stream(trtllm: Server, tiny_dir: Path) -> None:
    def names() -> list[str]:
        return [each["id"] for each in json.loads(post(door, "/v1/models", b"", "GET")[2])["data"]]

    with running_door(trtllm.grpc, tiny_dir) as door:
        eventually(lambda: names() == ["ensemble"])
        greedy = {"max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": False}
        said = streamed(door, COMPLETIONS, model="ensemble", prompt=PROMPT, **greedy)
        inputs = text_inputs(PROMPT, 12, ignore_eos=True)
        assert said.texts == [ask(trtllm.grpc, "ensemble", inputs).text]
    warnings = "\n".join(door.lines)
    assert "tensorrt_llm_bls is not offered: its responses repeat the text before them" in warnings
    assert "unary_ensemble is not offered: it is not decoupled" in warnings
