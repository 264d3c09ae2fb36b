"""Sends what the client of Triton's tutorial on constrained decoding sends, and reads the answers as it does.

The client asks the models of TensorRT-LLM, with instructions in its prompt or a logits processor, whose place
a grammar takes.
"""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import numpy as np
import pytest

from helpers.raw_grpc import ask
from helpers.server import Server

MODELS = ("classic_ensemble", "classic_tensorrt_llm_bls")
PROMPT = "The quick"
FORMAT = {
    "type": "object",
    "properties": {"title": {"type": "string", "maxLength": 4}, "alive": {"type": "boolean"}},
    "required": ["title", "alive"],
    "additionalProperties": False,
}


def fields(*, is_streaming: bool, **more: Any) -> dict[str, Any]:
    """The tensors of every request of the client, and more of them."""
    return {
        "text_input": np.array([[PROMPT]], dtype=object),
        "max_tokens": np.int32([[60]]),
        "stream": np.array([[is_streaming]]),
        "beam_width": np.int32([[1]]),
        "temperature": np.float32([[1.0]]),
    } | more


def texts(values: list[str]) -> np.ndarray[Any, Any]:
    return np.array([values], dtype=object)


def answer(server: Server, model: str, *, is_streaming: bool, **more: Any) -> str:
    """The text that the client prints: all pieces of a stream, or the last response."""
    outcome = ask(server.grpc, model, fields(is_streaming=is_streaming, **more))
    assert (outcome.errors, outcome.num_finals, outcome.call_error) == ([], 1, "")
    pieces = [response["text_output"][0].decode() for response in outcome.responses]
    return "".join(pieces) if is_streaming else pieces[-1]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "more",
    [
        {},
        {
            "stop_words": texts(["never said"]),
            "bad_words": texts(["nor this"]),
            "embedding_bias_words": texts(["fox"]),
            "embedding_bias_weights": np.float32([[-2.0]]),
            "repetition_penalty": np.float32([[1.1]]),
            "presence_penalty": np.float32([[0.5]]),
            "end_id": np.int32([[2]]),
            "pad_id": np.int32([[2]]),
        },
    ],
    ids=["plain", "with every option"],
)
def test_the_client_prints_the_same_streamed_and_whole(
    presets: Server, model: str, more: dict[str, Any]
) -> None:
    streamed = answer(presets, model, is_streaming=True, **more)
    assert streamed
    assert answer(presets, model, is_streaming=False, **more) == PROMPT + streamed


@pytest.mark.parametrize("model", MODELS)
def test_a_guide_does_what_the_logits_processor_did(presets: Server, model: str) -> None:
    guide = {
        "guided_decoding_guide_type": texts(["json_schema"]),
        "guided_decoding_guide": texts([json.dumps(FORMAT)]),
    }
    text = answer(presets, model, is_streaming=True, **guide)
    jsonschema.validate(json.loads(text), FORMAT)


@pytest.mark.parametrize("model", MODELS)
def test_a_logits_processor_is_refused_by_name(presets: Server, model: str) -> None:
    name = texts(["lmfe_processor"])
    outcome = ask(presets.grpc, model, fields(is_streaming=False, logits_post_processor_name=name))
    assert not outcome.responses
    (error,) = outcome.errors
    assert "logits_post_processor_name" in error
