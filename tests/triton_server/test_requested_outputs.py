from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from helpers.triton_server_doubles import LIMITS, FakeSource, llm_source
from naiad.errors import InvalidRequestError
from naiad.frontend.limits import ModelLimits
from naiad.frontend.request import GenerateRequest
from naiad.triton_server.requests.llm import read_request

# 256 MiB are 1,024 positions of 65,536 logits.
LARGE = ModelLimits(max_model_len=4096, vocab_size=65_536, eos_token_ids=(2,), exclude_input_in_output=False)


def read(source: FakeSource, limits: ModelLimits = LIMITS) -> GenerateRequest:
    request = read_request(source, limits)
    assert isinstance(request, GenerateRequest)
    return request


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ({}, -1),
        ({"return_log_probs": False, "num_log_probs": 0}, -1),
        ({"return_log_probs": True}, 0),
        ({"num_log_probs": 20}, 20),
        ({"return_log_probs": True, "num_log_probs": 3}, 3),
    ],
)
def test_the_engine_computes_log_probs_only_when_asked(sent: dict[str, Any], expected: int) -> None:
    request = read(llm_source(**sent))
    assert request.rows[0].params.num_log_probs == expected
    assert request.outputs.log_probs is bool(sent.get("return_log_probs"))


def test_requested_outputs_come_as_parameters_too() -> None:
    sent = {"return_log_probs": True, "num_log_probs": 2, "num_return_sequences": 3}
    outputs = read(llm_source(parameters=sent)).outputs
    assert (outputs.log_probs, outputs.num_log_probs, outputs.num_return_sequences) == (True, 2, 3)


def test_logits_are_asked_of_the_engine() -> None:
    params = read(llm_source(return_context_logits=True, return_generation_logits=True)).rows[0].params
    assert (params.returns_context_logits, params.returns_generation_logits) == (True, True)
    params = read(llm_source(return_context_logits=False, return_generation_logits=False)).rows[0].params
    assert (params.returns_context_logits, params.returns_generation_logits) == (False, False)


@pytest.mark.parametrize(
    ("prompt_length", "sent"),
    [
        (1024, {"return_context_logits": True}),
        (512, {"return_context_logits": True, "streaming": True}),
        (3, {"return_generation_logits": True, "request_output_len": 1024}),
        (3, {"return_generation_logits": True, "request_output_len": 64, "num_return_sequences": 16}),
        (24, {"return_context_logits": True, "return_generation_logits": True, "request_output_len": 1000}),
        (1020, {"return_context_logits": True, "num_return_sequences": 16}),
        (4000, {"return_generation_logits": True, "request_output_len": 4096}),
        (4000, {"request_output_len": 4096}),
    ],
)
def test_256_mib_of_logits_are_allowed(prompt_length: int, sent: dict[str, Any]) -> None:
    assert read(llm_source([1] * prompt_length, **sent), LARGE).rows


@pytest.mark.parametrize(
    ("prompt_length", "sent", "num_positions"),
    [
        (1025, {"return_context_logits": True}, 1025),
        (513, {"return_context_logits": True, "streaming": True}, 1026),
        (3, {"return_generation_logits": True, "request_output_len": 1025}, 1025),
        (3, {"return_generation_logits": True, "request_output_len": 65, "num_return_sequences": 16}, 1040),
        (
            24,
            {"return_context_logits": True, "return_generation_logits": True, "request_output_len": 1001},
            1025,
        ),
    ],
)
def test_more_logits_are_refused_with_their_size(
    prompt_length: int, sent: dict[str, Any], num_positions: int
) -> None:
    with pytest.raises(InvalidRequestError, match=f"{num_positions * 262_144} bytes .*at most 268435456"):
        read_request(llm_source([1] * prompt_length, **sent), LARGE)


def test_the_rows_of_a_request_share_the_bound() -> None:
    source = llm_source([1] * 1000, return_context_logits=True)
    assert read(source, LARGE).rows
    doubled = {name: np.repeat(tensor, 2, axis=0) for name, tensor in source.inputs.items()}
    with pytest.raises(InvalidRequestError, match="2000 positions of 65536 logits"):
        read_request(FakeSource(doubled), LARGE)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("num_return_sequences", [1, 2]),
        ("num_log_probs", [0, 1]),
        ("return_log_probs", [True, False]),
        ("return_context_logits", [True, False]),
        ("return_generation_logits", [True, False]),
    ],
)
def test_rows_must_request_the_same_outputs(name: str, values: list[Any]) -> None:
    source = llm_source()
    doubled = {key: np.repeat(tensor, 2, axis=0) for key, tensor in source.inputs.items()}
    with pytest.raises(InvalidRequestError, match=f"{name} differs between the rows"):
        read_request(FakeSource(doubled | {name: np.array(values)[:, None]}), LIMITS)
