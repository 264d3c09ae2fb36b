"""TensorRT-LLM's three unary models, called one by one as its gRPC and HTTP clients do."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import tritonclient.http as http
from tritonclient.utils import InferenceServerException, np_to_triton_dtype, triton_to_np_dtype

from helpers.manual_chain import TRTLLM_STEPS, Call, by_hand, texts
from helpers.preset_server import Tensors, infer
from helpers.raw_grpc import as_tensor
from helpers.server import Server

PROMPT = "The quick brown"
NUM_TOKENS = 24
STEPS = tuple(f"unary_{step}" for step in TRTLLM_STEPS)
BLS, DETOKENIZER = "unary_tensorrt_llm_bls", STEPS[2]
THE_QUICK, ITS = [294, 360, 307], [291, 288]


@pytest.fixture(params=["grpc", "http", "json"])
def call(presets: Server, request: pytest.FixtureRequest) -> Call:
    way = {"grpc": infer, "http": infer_by_http, "json": infer_by_json}[request.param]
    return lambda model, inputs: way(presets, model, inputs)


def infer_by_http(server: Server, model: str, inputs: Tensors) -> Tensors:
    """Send binary tensors, as tritonclient does."""
    tensors = []
    for name, value in inputs.items():
        array = as_tensor(value)
        tensors.append(http.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype)))
        tensors[-1].set_data_from_numpy(array)
    with http.InferenceServerClient(server.http) as client:
        result = client.infer(model, tensors)
    return {each["name"]: result.as_numpy(each["name"]) for each in result.get_response()["outputs"]}


def infer_by_json(server: Server, model: str, inputs: Tensors) -> Tensors:
    """Send JSON, as with curl."""
    arrays = {name: as_tensor(value) for name, value in inputs.items()}
    tensors = [
        {
            "name": name,
            "shape": array.shape,
            "datatype": np_to_triton_dtype(array.dtype),
            "data": plain(array),
        }
        for name, array in arrays.items()
    ]
    status, text = server.post(f"/v2/models/{model}/infer", {"inputs": tensors})
    if status != 200:
        raise InferenceServerException(json.loads(text)["error"], str(status))
    return {
        each["name"]: np.array(each["data"], dtype=triton_to_np_dtype(each["datatype"])).reshape(
            each["shape"]
        )
        for each in json.loads(text)["outputs"]
    }


def plain(array: Any) -> list[Any]:
    values = array.reshape(-1).tolist()
    return [value.decode() if isinstance(value, bytes) else value for value in values]


# By the names of the text level.
CASES: dict[str, Tensors] = {
    "plain": {},
    "excluded": {"exclude_input_in_output": True},
    "sampled": {"temperature": 0.8, "top_k": 40, "seed": np.array([[5]], dtype=np.uint64)},
    "bad words": {"bad_words": ["世", "们"]},
    "stop words": {"stop_words": ["op", "pac"]},
    "biases": {"embedding_bias_words": ["fox"], "embedding_bias_weights": [30.0]},
    "beams": {"beam_width": 2},
    "end_id": {"end_id": 316, "ignore_eos": False},
}
OF_TOKENIZER = {
    "bad_words": "BAD_WORDS_DICT",
    "stop_words": "STOP_WORDS_DICT",
    "embedding_bias_words": "EMBEDDING_BIAS_WORDS",
    "embedding_bias_weights": "EMBEDDING_BIAS_WEIGHTS",
    "end_id": "END_ID",
}
OF_LLM = {"top_k": "runtime_top_k"}


@pytest.mark.parametrize("case", CASES)
def test_the_chain_gives_the_text_of_the_bls(presets: Server, call: Call, case: str) -> None:
    fields: Tensors = {"ignore_eos": True} | CASES[case]
    query = {"QUERY": PROMPT, "REQUEST_OUTPUT_LEN": NUM_TOKENS}
    query |= {OF_TOKENIZER[name]: value for name, value in fields.items() if name in OF_TOKENIZER}
    more = {OF_LLM.get(name, name): value for name, value in fields.items() if name not in OF_TOKENIZER}
    # The ids of a packed stop word stay in the output.
    whole = {"text_input": PROMPT, "max_tokens": NUM_TOKENS, "include_stop_str_in_output": True, **fields}
    expected = texts(infer(presets, BLS, whole)["text_output"])
    assert len(expected) == (2 if case == "beams" else 1)
    assert all(text.startswith(PROMPT) for text in expected) == (case != "excluded")
    if case != "plain":
        undisturbed = {"text_input": PROMPT, "max_tokens": NUM_TOKENS, "ignore_eos": True}
        assert expected != texts(infer(presets, BLS, undisturbed)["text_output"])
    assert by_hand(call, STEPS, query, more) == expected


def test_every_transport_gives_the_same_outputs_of_the_bls(presets: Server, call: Call) -> None:
    inputs = {"text_input": PROMPT, "max_tokens": NUM_TOKENS, "ignore_eos": True, "return_log_probs": True}
    expected, found = infer(presets, BLS, inputs), call(BLS, inputs)
    assert texts(found["text_output"]) == texts(expected["text_output"])
    assert found["output_log_probs"].shape == expected["output_log_probs"].shape == (1, 1, NUM_TOKENS)
    assert found["output_log_probs"] == pytest.approx(expected["output_log_probs"], abs=1e-3)


# Ids [B, beams, n], lengths [B, beams], texts.
BATCHES: dict[str, tuple[Any, Any, list[str]]] = {
    "rows": ([[THE_QUICK], [[*ITS, -1]]], [[3], [2]], ["The quick", "It's"]),
    "beams": ([[THE_QUICK, [*ITS, -1]]], [[3, 2]], ["The quick", "It's"]),
    "rows of beams": (
        [[THE_QUICK, [*ITS, -1]], [[*ITS, 294], THE_QUICK]],
        [[3, 2], [3, 3]],
        ["The quick", "It's", "It'sThe", "The quick"],
    ),
    "shorter than sent": ([[THE_QUICK, THE_QUICK]], [[1, 0]], ["The", ""]),
    "an end of text": ([[[*ITS, 1]]], [[3]], ["It's"]),
}


@pytest.mark.parametrize("case", BATCHES)
def test_postprocessing_gives_a_text_for_each_beam_of_each_row(call: Call, case: str) -> None:
    ids, lengths, expected = BATCHES[case]
    batch = {
        "TOKENS_BATCH": np.array(ids, dtype=np.int32),
        "SEQUENCE_LENGTH": np.array(lengths, dtype=np.int32),
    }
    output = call(DETOKENIZER, batch)["OUTPUT"]
    assert output.shape == (len(expected),)
    assert texts(output) == expected


def test_postprocessing_needs_a_length_for_each_beam(call: Call) -> None:
    batch = {"TOKENS_BATCH": np.array([[THE_QUICK, THE_QUICK]], dtype=np.int32), "SEQUENCE_LENGTH": 3}
    with pytest.raises(InferenceServerException, match="SEQUENCE_LENGTH has 1 values for 2 rows"):
        call(DETOKENIZER, batch)
