"""A model, or a version of one, that the server does not have: Triton's own answers, as they are."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2_grpc

from helpers.raw_grpc import build_request, text_inputs
from helpers.server import Server

# Model, version, and what Triton says.
UNKNOWN = [
    ("nobody", "", "Request for unknown model: 'nobody' is not found"),
    ("ensemble", "7", "Request for unknown model: 'ensemble' version 7 is not found"),
    ("tokenizer", "7", "Request for unknown model: 'tokenizer' version 7 is not found"),
]


def request_for(model: str, version: str) -> Any:
    return build_request(model, text_inputs("Once", 3), model_version=version)


@pytest.mark.parametrize(("model", "version", "said"), UNKNOWN)
def test_a_call_ends_with_not_found(tiny: Server, model: str, version: str, said: str) -> None:
    with grpc.insecure_channel(tiny.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        with pytest.raises(grpc.RpcError) as failed:
            stub.ModelInfer(request_for(model, version), timeout=60)
    assert (failed.value.code(), failed.value.details()) == (grpc.StatusCode.NOT_FOUND, said)


@pytest.mark.parametrize(("model", "version", "said"), UNKNOWN)
def test_a_stream_gets_an_error_and_goes_on(tiny: Server, model: str, version: str, said: str) -> None:
    requests = [request_for(model, version), request_for("ensemble", "1")]
    with grpc.insecure_channel(tiny.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        error, *answers = stub.ModelStreamInfer(iter(requests), timeout=60)
    # Triton does not mark it as the last answer of its request.
    assert (error.error_message, dict(error.infer_response.parameters)) == (said, {})
    assert [answer.error_message for answer in answers] == [""] * len(answers)
    assert answers[-1].infer_response.parameters["triton_final_response"].bool_param


@pytest.mark.parametrize("endpoint", ["generate", "generate_stream", "infer"])
@pytest.mark.parametrize(("model", "version", "said"), UNKNOWN)
def test_http_answers_404(tiny: Server, model: str, version: str, said: str, endpoint: str) -> None:
    place = f"{model}/versions/{version}" if version else model
    status, text = tiny.post(f"/v2/models/{place}/{endpoint}", {"text_input": "Once", "max_tokens": 3})
    assert (status, said in text) == (404, True)
