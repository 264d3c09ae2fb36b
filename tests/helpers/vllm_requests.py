"""Requests to the vLLM backend's model, read with a tiny tokenizer."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from helpers.triton_server_doubles import LIMITS, FakeSource
from naiad.frontend.prompt import PromptEncoder
from naiad.sequence import SamplingParams
from naiad.tokenization import Tokenizer
from naiad.triton_server.requests.vllm import VLLMRequest, VLLMRequestReader


def make_reader(tokenizer: Tokenizer) -> VLLMRequestReader:
    return VLLMRequestReader(PromptEncoder(tokenizer, LIMITS.max_model_len, LIMITS.vocab_size))


def source(
    sampling: dict[str, Any] | str | None = None, parameters: dict[str, Any] | None = None, **tensors: Any
) -> FakeSource:
    inputs = {"text_input": "The quick"} | tensors
    if sampling is not None:
        inputs["sampling_parameters"] = sampling if isinstance(sampling, str) else json.dumps(sampling)
    made = {
        name: np.array([value.encode()], dtype=np.object_) if isinstance(value, str) else np.array([value])
        for name, value in inputs.items()
        if value is not None
    }
    return FakeSource(made, parameters or {})


def read(reader: VLLMRequestReader, *args: Any, **tensors: Any) -> VLLMRequest:
    request = reader.read(source(*args, **tensors), LIMITS)
    assert isinstance(request, VLLMRequest)
    return request


def params(reader: VLLMRequestReader, sampling: dict[str, Any] | str | None) -> SamplingParams:
    return read(reader, sampling).rows[0].params
